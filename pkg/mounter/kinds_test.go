package mounter

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// A caller distinguishes a path that does not exist from a failure, without parsing the text.
func TestAMissingPathHasAKind(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "nope")
	_, deviceErr := FindDevice(missing)
	root, rootErr := OpenRoot(missing)
	if root != nil {
		root.Close()
	}
	link := missing + "-link"
	check(t, os.Symlink(missing, link))
	_, linkErr := OpenRoot(link)
	_, probeErr := superblock.ProbeDevice(missing)
	_, identifyErr := superblock.Identify(missing, "ext4")
	_, fingerprintErr := superblock.Fingerprint(missing)
	_, _, proofErr := superblock.ProveBlank(t.Context(), missing, superblock.Reading{})
	for what, c := range map[string]struct {
		err  error
		kind fault.Kind
	}{
		"OpenRoot": {rootErr, fault.NotFound}, "OpenRoot of a link": {linkErr, fault.NotFound},
		// A volume whose device node is missing is not a missing volume, which NotFound would be for CSI.
		"FindDevice": {deviceErr, fault.State}, "ProbeDevice": {probeErr, fault.State}, "Identify": {identifyErr, fault.State},
		"Fingerprint": {fingerprintErr, fault.State}, "ProveBlank": {proofErr, fault.State},
	} {
		if !fault.Is(c.err, c.kind) || !errors.Is(c.err, fs.ErrNotExist) || !strings.Contains(c.err.Error(), missing) {
			t.Errorf("%s: %v, kind %v", what, c.err, fault.KindOf(c.err))
		}
	}
	if _, err := FindDevice(filepath.Dir(missing)); !fault.Is(err, fault.State) {
		t.Errorf("a directory: %v, kind %v", err, fault.KindOf(err))
	}
}

// What HeldBy returns is a sentence of its own. Callers join it to theirs.
func TestWhoHoldsADeviceIsASentenceOfItsOwn(t *testing.T) {
	d, r := formatted(t, "ext4"), openRoot(t)
	if who := HeldBy(d); who != (fault.Private{}) || who.After("; ") != who {
		t.Errorf("nobody has it: %+v", who)
	}
	for n, want := range []string{"it is mounted elsewhere on this node, and", "it is mounted in 2 places on this node, and"} {
		name := string(rune('a' + n))
		mountAt(t, r, Filesystem{Device: d, Type: "ext4"}, name)
		defer unmountAt(t, r, name)
		who := Holders(d)
		if n > 0 { // a line for each namespace, and this process is in one
			who = append(who, "another")
		}
		got := heldBy(who)
		if !strings.HasPrefix(got.Public, want) || !strings.Contains(got.Detail, r.Path()) {
			t.Errorf("%+v", got)
		}
		if err := fault.New(fault.State, "in use%s", got.After("; ")); !strings.HasPrefix(err.Error(), "in use; "+want) ||
			len(fault.Details(err)) != 1 || strings.Contains(err.Error(), r.Path()) {
			t.Errorf("%v, and the log shows %q", err, fault.Details(err))
		}
	}
}
