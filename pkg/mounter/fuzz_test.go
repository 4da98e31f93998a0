package mounter

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// Options are passed on as text: to a guest, to mount(8), to mount(2). Every reader of that
// text must find the same options, and none that was refused.
func FuzzOptionsThatAreHandedOn(f *testing.F) {
	for _, s := range []string{
		"ro,noatime,commit=5", `context="system_u:object_r:container_file_t:s0:c1,c2",discard`, `vers="4.2,addr=192.0.2.1"`,
		`subvol="x,device=/dev/sda"`, `context="a:b:c:s0,errors=panic"`, `"commit=5,errors=panic"`,
		"context=a:b:c:s0:c1,c2,c3", `"data=ordered"`,
	} {
		for _, fstype := range []string{"", "ext4", "btrfs", "nfs"} {
			f.Add(s, fstype)
		}
	}
	f.Fuzz(func(t *testing.T, s, fstype string) {
		o, err := ParseOptions([]string{s})
		if err != nil {
			return
		}
		taken := CheckOptions(fstype, o) == nil
		for how, text := range map[string][]string{
			"each by itself": o.List(), "all in one": {strings.Join(o.List(), ",")}, "the superblock's": {o.SuperblockString()},
		} {
			again, err := ParseOptions(text)
			if err != nil || !slices.Equal(again.Superblock, o.Superblock) {
				t.Errorf("%s, %q reads as %q, not %q: %v", how, text, again.Superblock, o.Superblock, err)
			}
			if taken && CheckOptions(fstype, again) != nil {
				t.Errorf("%q is allowed for %q, and %s it is not", s, fstype, how)
			}
		}
		for _, word := range strings.Split(o.SuperblockString(), ",") {
			if key, value, _ := strings.Cut(word, "="); taken && (key == "device" || key == "addr" || key == "errors" && value == "panic") {
				t.Errorf("%q, allowed for %q, has %q for those who split at commas", s, fstype, word)
			}
		}
	})
}

// A label may come from a guest or a server. Two labels are the same only if they have the same
// categories, in any notation. Parsing costs no more than the label's length.
func FuzzSameLabel(f *testing.F) {
	f.Add([]byte{1, 2, 3, 9}, uint64(1), "s0:c3.c1")
	f.Add([]byte{0, 255}, uint64(2), "s0[0 255]")
	f.Add([]byte{}, uint64(3), strings.Repeat("c0.c9999,", 200)+"c1")
	f.Fuzz(func(t *testing.T, set []byte, seed uint64, other string) {
		if len(other) > 1<<16 {
			return
		}
		longest := 10_000*len("c9999,") + len(other) // every category once
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		SameLabel(other, "u:r:t:s0:"+other)
		runtime.ReadMemStats(&after)
		if used := after.TotalAlloc - before.TotalAlloc; used > 8<<20+uint64(100*len(other)) {
			t.Errorf("a label of %d bytes takes %d to compare", len(other), used)
		}
		for _, label := range []string{other, "u:r:t:" + other, "u:r:t:s0:" + other} {
			canon := canonicalLabel(label)
			if len(canon) > 2*longest {
				t.Errorf("a label of %d bytes is spelled out with %d", len(label), len(canon))
			}
			if none := "u:r:t:s0:"; label != none && SameLabel(label, none) {
				t.Errorf("%q is taken for %q", label, none)
			}
			if !SameLabel(label, canon) {
				t.Errorf("%q is not %q", label, canon)
			}
		}
		const plain = "u:r:t:s0"
		slices.Sort(set)
		set = slices.Compact(set)
		if len(set) == 0 {
			return
		}
		r := rand.New(rand.NewPCG(seed, 0))
		spell := func(set []byte) string {
			var parts []string
			for i := 0; i < len(set); {
				last := i
				for last+1 < len(set) && set[last+1] == set[last]+1 && r.IntN(3) > 0 {
					last++
				}
				if last > i {
					parts = append(parts, fmt.Sprintf("c%d.c%d", set[i], set[last]))
				} else {
					parts = append(parts, fmt.Sprintf("c%d", set[i]))
				}
				i = last + 1
			}
			r.Shuffle(len(parts), func(a, b int) { parts[a], parts[b] = parts[b], parts[a] })
			return plain + ":" + strings.Join(parts, ",")
		}
		a, b := spell(set), spell(set)
		if !SameLabel(a, b) {
			t.Errorf("%s is not %s", a, b)
		}
		less := slices.Delete(slices.Clone(set), len(set)-1, len(set))
		fewer := plain
		if len(less) > 0 {
			fewer = spell(less)
		}
		if SameLabel(a, fewer) {
			t.Errorf("%s is %s", a, fewer)
		}
		// A label that is not in SELinux's syntax equals none of these.
		if rest, ok := strings.CutPrefix(other, "s0"); ok && !strings.HasPrefix(rest, ":c") && SameLabel(a, "u:r:t:"+other) {
			t.Errorf("%s is %q", a, other)
		}
	})
}

// A disk's own data becomes its identity, which is stored in a record and must be found again
// unchanged.
func FuzzIdentity(f *testing.F) {
	files := []string{
		"wwid", "device/wwid", "md/uuid", "device/cid", "device/vpd_pg83", "device/vpd_pg80", "serial", "dm/uuid", "diskseq", "partition",
	}
	for i := range files {
		f.Add(uint8(i), []byte("naa.5000c500a1b2c3d4\n"))
		f.Add(uint8(i), []byte("QM\xff\xfe0001"))
		f.Add(uint8(i), []byte("QM�0001\x00\x1b[2J"))
	}
	f.Fuzz(func(t *testing.T, which uint8, said []byte) {
		if len(said) > 4096 {
			return // sysfs returns at most a page
		}
		name := files[int(which)%len(files)]
		m := machine(t, "boot", map[string]string{"vda/dev": "254:0", "vda/size": "8\n", "vda/" + name: string(said)})
		id, err := m.of("/nowhere/x", 254, 0, 0)
		if err != nil {
			return
		}
		if !id.Known() || id.Value == "" {
			t.Errorf("%s says %q: %+v", name, said, id)
		}
		b, err := json.Marshal(id)
		if err != nil {
			t.Fatal(err)
		}
		var again Identity
		if err := json.Unmarshal(b, &again); err != nil || again != id {
			t.Errorf("%s says %q: %+v is kept as %+v (%v)", name, said, id, again, err)
		}
	})
}
