package driver

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/internal/record"
)

// A driver upgraded while a volume is deferred finds the record under its old name and moves it.
func TestC08_RecordsUnderAnEarlierName(t *testing.T) {
	dir := t.TempDir()
	old := deferral{VolumeID: "p.v", BootID: "boot", Target: "/kubelet/t"}
	if err := deferralType.Write(filepath.Join(dir, "old"+record.Extension), old); err != nil {
		t.Fatal(err)
	}
	d, err := loadDeferrals(dir, "boot")
	if err != nil {
		t.Fatal(err)
	}
	r, ok := d.at("p.v", "/kubelet/t")
	if !ok || r.Target != old.Target {
		t.Fatalf("found %+v", d.of("p.v"))
	}
	if err := d.remove(r); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
