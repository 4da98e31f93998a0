package podvm

import (
	"os"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/microvm"
)

// C24: where emulation is refused, no guest is emulated, whatever this machine has.
func TestC24_EmulationCanBeRefused(t *testing.T) {
	t.Setenv(microvm.AccelVariable, "tcg") // the configuration counts more
	for asked, want := range map[string]struct{ accel, err string }{
		"kvm": {"kvm", ""}, "tcg": {"tcg", ""}, "": {"tcg", ""}, "fast": {"", `"fast": kvm, tcg (emulation) or auto`},
	} {
		accel, _, err := (&Runtime{Accel: asked}).accelerator(t.Context())
		if _, ok, _ := kvmGroups(); asked == "kvm" && !ok {
			want.accel, want.err = "", "emulation is refused"
		}
		switch {
		case accel != want.accel:
			t.Errorf("%q: %q, %v", asked, accel, err)
		case (err == nil) != (want.err == "") || err != nil && !strings.Contains(err.Error(), want.err):
			t.Errorf("%q: %v", asked, err)
		}
	}
	if _, err := os.Stat(kvmDevice); err != nil {
		_, _, err := (&Runtime{Accel: "kvm"}).accelerator(t.Context())
		if err == nil || !strings.Contains(err.Error(), kvmDevice) {
			t.Errorf("without KVM: %v", err)
		}
	}
}
