package driver

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A process without descriptors learns nothing from its records, and does not start.
func TestWithoutDescriptorsNoRecordIsRead(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	for what, load := range map[string]func(dir string, put bool) error{
		"staged": func(dir string, put bool) error {
			s, err := loadStaged(dir, "boot", log)
			if err == nil && put {
				err = s.put(stagedRecord{VolumeID: "v"})
			}
			return err
		},
		"published": func(dir string, put bool) error {
			p, err := loadPublished(dir, "boot", log)
			if err == nil && put {
				err = p.note("v", "/t", shown{Group: "5"}, false)
			}
			return err
		},
		"deferred": func(dir string, put bool) error {
			d, err := loadDeferrals(dir, "boot")
			if err == nil && put {
				err = d.put(deferral{VolumeID: "v", Target: "/t"})
			}
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			if err := load(dir, true); err != nil {
				t.Fatal(err)
			}
			var err error
			testnode.WithoutDescriptors(t, func() { err = load(dir, false) })
			if !errors.Is(err, linux.EMFILE) {
				t.Errorf("%v", err)
			}
			if err := load(dir, false); err != nil {
				t.Errorf("later: %v", err)
			}
		})
	}
}
