package node

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// Programs that split options at commas, such as mount(8) and mount(2), would find a second option
// in the value of another.
func TestALow_AnOptionIsNotTwo(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	for fs, option := range map[string]string{"btrfs": `subvol="x,device=/dev/vda"`, "ext4": `commit="5,errors=panic"`,
		"xfs": `context="a:b:c:s0,logdev=/dev/vda"`} {
		_, err := n.Client.Create(ctxOf(t), fs, size, csiclient.Volume{FSType: fs, MountFlags: []string{option}}, nil, nil)
		refused(t, err, codes.InvalidArgument, "comma", strings.ReplaceAll(option, `"`, ""))
	}
}

// A list says what a class or a claim may request of the node's kernel.
func TestALow_OptionsAreAList(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	for fs, options := range map[string][]string{
		"ext4": {"errors=panic", "data=writeback", "journal_dev=0x800", "journal_path=/dev/vda", "usrjquota=aquota.user", "noload",
			"nobarrier", "debug", "sb=1"},
		"xfs":   {"logdev=/dev/vda", "rtdev=/dev/vda", "norecovery", "errors=remount-ro"},
		"btrfs": {"device=/dev/vda", "degraded", "fatal_errors=panic", "rescue=all"},
		"":      {"errors=panic", "device=/dev/vda", "logdev=/dev/vda"},
	} {
		v := create(t, n, "v"+fs, csiclient.Volume{FSType: fs})
		for _, option := range options {
			w := v
			w.MountFlags = []string{option}
			_, err := n.Client.Create(ctxOf(t), "other"+fs, size, w, nil, nil)
			refused(t, err, codes.InvalidArgument, option, "docs/parameters.md")
			refused(t, n.Client.Stage(ctxOf(t), w), codes.InvalidArgument, option, "docs/parameters.md")
		}
		ok(t, n.Client.Stage(ctxOf(t), v))
		for _, option := range options {
			w := v
			w.MountFlags = []string{option}
			refused(t, n.Client.Publish(ctxOf(t), w, n.Target("a"), false), codes.InvalidArgument, option)
		}
		down(t, n, v.ID)
	}
	// An option of another file system is found once the volume has one: none was named.
	v := create(t, n, "late", csiclient.Volume{})
	v.MountFlags = []string{"allocsize=64k"}
	refused(t, n.Client.Stage(ctxOf(t), v), codes.InvalidArgument, "allocsize=64k", "ext4")
	v.MountFlags = nil
	ok(t, n.Client.Stage(ctxOf(t), v))
	v.MountFlags = []string{"allocsize=64k"}
	refused(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false), codes.InvalidArgument, "allocsize=64k", "ext4", "docs/parameters.md")
	down(t, n, v.ID)
	// Common options still work.
	for fs, options := range map[string][]string{
		"ext4":  {"commit=17", "errors=remount-ro", "discard", "noatime", "stripe=16"},
		"xfs":   {"allocsize=64k", "inode64", "discard", "nouuid"},
		"btrfs": {"compress=zstd", "nodatacow", "discard=async", "space_cache=v2"},
	} {
		if !slices.Contains(filesystems, fs) {
			continue // only the guests' kernels have it
		}
		v := create(t, n, "good"+fs, csiclient.Volume{FSType: fs, MountFlags: options})
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target("good"), false))
		down(t, n, v.ID, n.Target("good"))
	}
}

// The same option in a superblock that somebody else wrote.
func TestALow_OptionsPanicInTheSuperblock(t *testing.T) {
	t.Parallel()
	dev := loopOf(t, "ext4")
	run(t, "tune2fs", "-e", "panic", dev)
	n := testnode.New(t, "", "--allow-device", dev)
	v := static("disk", dev, "ext4")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	if shown := read(t, "/proc/fs/ext4/"+filepath.Base(dev)+"/options"); !strings.Contains(shown, "errors=remount-ro") {
		t.Errorf("an error on the volume ends the node:\n%s", shown)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}
