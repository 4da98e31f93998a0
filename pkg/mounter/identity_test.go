package mounter

import (
	"os"
	"path/filepath"
	"testing"
)

// machine makes a sysfs for a test: files by path below /sys/devices, and the numbers of disks.
func machine(t testing.TB, boot string, files map[string]string) identities {
	t.Helper()
	sys := t.TempDir()
	if err := os.MkdirAll(sys+"/dev/block", 0o755); err != nil {
		t.Fatal(err)
	}
	for path, text := range files {
		file := filepath.Join(sys, "devices", path)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if filepath.Base(file) == "dev" {
			if err := os.Symlink(filepath.Dir(file), sys+"/dev/block/"+text); err != nil {
				t.Fatal(err)
			}
		}
	}
	return identities{sys: sys, dev: "/nowhere", boot: boot}
}

func TestA02_IdentityIsOfTheDisk(t *testing.T) {
	files := map[string]string{
		"nvme0/nvme0n1/dev": "259:0", "nvme0/nvme0n1/wwid": "eui.0025385b91b0f2c1\n", "nvme0/nvme0n1/diskseq": "9\n",
		"nvme0/nvme0n1/nvme0n1p1/dev": "259:1", "nvme0/nvme0n1/nvme0n1p1/partition": "1\n",
		"nvme0/nvme0n1/nvme0n1p1/start": "2048\n", "nvme0/nvme0n1/nvme0n1p1/size": "4096\n",
		"nvme0/nvme0n1/nvme0n1p2/dev": "259:2", "nvme0/nvme0n1/nvme0n1p2/partition": "2\n",
		"nvme0/nvme0n1/nvme0n1p2/start": "6144\n", "nvme0/nvme0n1/nvme0n1p2/size": "4096\n",
		"sda/dev": "8:0", "sda/device/wwid": "naa.5000c500a1b2c3d4\n",
		"sdb/dev": "8:16", "sdb/device/wwid": "naa.5000c500a1b2c3d4\n", // the same disk on another path
		"sdc/dev": "8:32", "sdc/device/vpd_pg80": "\x00\x80\x00\x04ABCD",
		"vda/dev": "254:0", "vda/serial": "disk-of-mine\n", "vda/diskseq": "1\n",
		"dm-0/dev": "253:0", "dm-0/dm/uuid": "LVM-abcdef\n",
		"nbd0/dev": "43:0", "nbd0/diskseq": "12\n", "nbd0/size": "2048\n",
		"old0/dev": "44:0", "old0/size": "2048\n",
	}
	m := machine(t, "boot-1", files)
	of := func(m identities, major, minor uint32) Identity {
		t.Helper()
		id, err := m.of("/nowhere/x", major, minor, 0)
		if err != nil || !id.Known() {
			t.Fatalf("%d:%d: %v %v", major, minor, id, err)
		}
		return id
	}
	for want, number := range map[string][2]uint32{
		"wwid eui.0025385b91b0f2c1":                   {259, 0},
		"wwid eui.0025385b91b0f2c1 from byte 1048576": {259, 1},
		"wwid naa.5000c500a1b2c3d4":                   {8, 0},
		"serial disk-of-mine":                         {254, 0},
		"dm LVM-abcdef":                               {253, 0},
		"number 43:0, disk 12 of this boot":           {43, 0},
		"number 44:0, 2048 sectors":                   {44, 0},
		"number 9:9,  sectors":                        {9, 9}, // not in sysfs
		"vpd 80 " + of(m, 8, 32).Value[len("80 "):]:   {8, 32},
	} {
		id := of(m, number[0], number[1])
		if id.String() != want {
			t.Errorf("%v is %q, not %q", number, id, want)
		}
		if lasting := id.Kind != "number"; id.Lasting() != lasting {
			t.Errorf("%s lasts: %v", id, id.Lasting())
		}
	}
	if !of(m, 8, 0).Overlaps(of(m, 8, 16)) {
		t.Error("two paths to one disk are two disks")
	}
	whole, one, two := of(m, 259, 0), of(m, 259, 1), of(m, 259, 2)
	if !whole.Overlaps(one) || !one.Overlaps(whole) || one.Overlaps(two) || two.Overlaps(one) {
		t.Error("a disk and its partitions: which overlap?")
	}
	// After a reboot, a number identifies nothing.
	later := machine(t, "boot-2", files)
	if of(m, 43, 0).SameDisk(of(later, 43, 0)) || !of(m, 254, 0).SameDisk(of(later, 254, 0)) {
		t.Error("which identities outlast a reboot?")
	}
	if (Identity{}).SameDisk(Identity{}) || (Identity{}).Overlaps(Identity{}) {
		t.Error("two unknown disks are one")
	}
}
