package loopdev

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// survey maps each bound loop device to its file, by the path that the kernel shows.
type survey map[string]string // name, "loop3", to path

// unknown stands for a file whose path is too long for the kernel to show.
const unknown = ""

func look() (survey, error) {
	dir, err := os.Open("/sys/block")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	s := survey{}
	for _, name := range names {
		if !strings.HasPrefix(name, "loop") {
			continue
		}
		switch shown, err := linux.ReadSmall("/sys/block/" + name + "/loop/backing_file"); {
		case err == nil:
			s[name] = strings.TrimSpace(shown)
		case linux.Short(err):
			return nil, err
		case !away(err):
			s[name] = unknown
		}
	}
	return s, err
}

// Find lists the loop devices of the file: those bound to it or to a part of it, and those that
// were when they were held (see Hold). For a deleted file it finds the devices that still hold it,
// by the path that they show. It does not find a device under another name of the file; see
// References.
func (n Nodes) Find(path string) ([]Device, error) {
	// Check the name first: opening every loop device of a busy node is slow.
	return n.find(path, func(shown string) bool { return shown == unknown })
}

// References is Find under any name. It opens every loop device.
func (n Nodes) References(path string) ([]Device, error) {
	return n.find(path, func(string) bool { return true })
}

func (n Nodes) find(path string, also func(shown string) bool) ([]Device, error) {
	f, err := linux.Openat2(linux.CWD, path, linux.OPath, 0)
	gone := errors.Is(err, linux.ENOENT)
	if err != nil && !gone {
		return nil, err
	}
	var want file
	if !gone {
		defer f.Close()
		if want, err = identify(f); err != nil {
			return nil, err
		}
	}
	return n.choose(func(shown string, h hold, held bool) bool {
		if gone {
			return shown == path+deleted
		}
		return held && h.backing == want || filepath.Base(trimBacking(shown)) == filepath.Base(path)
	}, func(shown string) bool { return !gone && also(shown) }, func(d Device) bool { return gone || d.backing == want })
}

// On lists the read-only loop devices that Attach made of the block device with that number whose node is, or was, at the path. Find looks
// for those of the node that is there now: if a disk was pulled, there may be none, or another disk's. Those of other programs are left
// out: anybody may bind one on a disk, and losetup names it by its whole path.
func (n Nodes) On(path string, major, minor uint32) ([]Device, error) {
	var node file
	f, err := linux.Openat2(linux.CWD, path, linux.OPath, 0)
	if err == nil {
		defer f.Close()
		var st linux.Statx
		if st, err = linux.StatxFile(f); err == nil && st.IsBlock() && st.RdevMajor == major && st.RdevMinor == minor {
			node, err = identify(f)
		}
	}
	if err != nil && !errors.Is(err, linux.ENOENT) {
		return nil, err
	}
	name := filepath.Base(path)
	name = name[:min(len(name), 63)] // lo_file_name has no more
	is := func(backing file) bool { return node != file{} && backing == node }
	return n.choose(func(shown string, h hold, held bool) bool {
		return held && is(h.backing) || filepath.Base(trimBacking(shown)) == filepath.Base(path)
	}, func(shown string) bool { return shown == unknown }, func(d Device) bool {
		ours := d.ReadOnly && (d.Held || d.now.Name == name) // a pod can change the name of a held one
		return ours && (is(d.backing) || d.now.RDevice == linux.MakeDev(major, minor))
	})
}

// Named lists the loop devices over files of that name, in any directory, for callers that cannot
// see the file itself.
func (n Nodes) Named(base string) ([]Device, error) {
	return n.choose(func(shown string, _ hold, _ bool) bool {
		return filepath.Base(trimBacking(shown)) == base
	}, func(string) bool { return false }, func(Device) bool { return true })
}

// Over lists the loop devices of each existing file, by path, as Find does for one, in a single pass. If a file cannot be looked at, it
// lists those of the others, with an error.
func (n Nodes) Over(paths []string) (map[string][]Device, error) {
	files, names := map[file]string{}, map[string]bool{}
	var failed error
	for _, path := range paths {
		names[filepath.Base(path)] = true
		f, err := linux.Openat2(linux.CWD, path, linux.OPath, 0)
		if err == nil {
			var is file
			if is, err = identify(f); err == nil {
				files[is] = path
			}
			f.Close()
		}
		if err != nil && !errors.Is(err, linux.ENOENT) {
			failed = errors.Join(failed, err)
		}
	}
	all, err := n.choose(func(shown string, h hold, held bool) bool {
		return names[filepath.Base(trimBacking(shown))] || held && files[h.backing] != ""
	}, func(shown string) bool { return shown == unknown }, func(d Device) bool { return files[d.backing] != "" })
	found := map[string][]Device{}
	for _, d := range all {
		found[files[d.backing]] = append(found[files[d.backing]], d)
	}
	return found, errors.Join(failed, err)
}

// choose lists the bound loop devices that take accepts, among the candidates that likely or also
// selects by the path that the kernel shows, and by the hold. If a device that only also selected
// cannot be examined, it is skipped: it is not ours. Holds themselves are left out.
func (n Nodes) choose(
	likely func(shown string, h hold, held bool) bool, also func(shown string) bool, take func(Device) bool,
) ([]Device, error) {
	all, err := look()
	if err != nil {
		return nil, err
	}
	holds, err := n.holds(all)
	if err != nil {
		return nil, err
	}
	var found []Device
	for name, shown := range all {
		h, held := holds.on[name]
		own := likely(shown, h, held)
		if holds.names[name] || !own && !also(shown) {
			continue
		}
		d, err := n.open(name)
		if away(err) || err != nil && !own && !linux.Short(err) {
			continue // just unbound, or not ours
		}
		if err != nil {
			return nil, err
		}
		if held {
			d.hold, d.Held, d.backing, d.ReadOnly = h, true, h.backing, h.readOnly
		}
		if take(d) {
			found = append(found, d)
		}
	}
	slices.SortFunc(found, func(a, b Device) int { return int(a.Minor) - int(b.Minor) })
	return found, nil
}

// SameFile reports whether both are over the same file.
func (d Device) SameFile(o Device) bool { return d.backing == o.backing }

// Writable returns the device of a file that accepts writes: preferably a held one, then one that
// shows the whole file, then any.
func Writable(devices []Device) (Device, bool) {
	var best Device
	rank := func(d Device) int {
		switch {
		case d.Held:
			return 3
		case !d.now.Part():
			return 2
		}
		return 1
	}
	ok := false
	for _, d := range devices {
		if !d.ReadOnly && (!ok || rank(d) > rank(best)) {
			best, ok = d, true
		}
	}
	return best, ok
}
