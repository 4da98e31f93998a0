package ownership

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// F02: nobody can change an immutable root directory, nor note there that everything else was changed.
func TestF02_AnImmutableRootIsToldOf(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command("chattr", "+i", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	defer func() { check(t, exec.Command("chattr", "-i", dir).Run()) }()
	if _, err := try(t.Context(), dir, 4242, OnRootMismatch); !fault.Is(err, fault.State) || !strings.Contains(err.Error(), "immutable") {
		t.Errorf("%v", err)
	}
}

// F02: an immutable root directory of a volume that has the group already keeps nobody out.
func TestF02_AnImmutableRootThatHasTheGroup(t *testing.T) {
	dir := t.TempDir()
	apply(t, dir, 4242, Always)
	if out, err := exec.Command("chattr", "+i", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	defer func() { check(t, exec.Command("chattr", "-i", dir).Run()) }()
	for _, policy := range []Policy{Always, OnRootMismatch} {
		if _, err := try(t.Context(), dir, 4242, policy); err != nil {
			t.Errorf("%s: %v", policy, err)
		}
	}
}
