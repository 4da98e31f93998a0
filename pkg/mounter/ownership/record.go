package ownership

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Attribute is the extended attribute on the root of a volume that records the group last given
// to its files. The trusted namespace is invisible in containers and moves with the volume to
// another node.
const Attribute = "trusted.crust.ownership"

// Record is the attribute's content: "v1 group=2000 state=clean".
type Record struct {
	Group uint32
	// Clean means that every file has the group. If it is false, a walk began and is not known
	// to have ended.
	Clean bool
}

const recordVersion = "v1"

func (r Record) String() string {
	state := "dirty"
	if r.Clean {
		state = "clean"
	}
	return fmt.Sprintf("%s group=%d state=%s", recordVersion, r.Group, state)
}

// ParseRecord parses the attribute's content. An unknown version or a malformed record is a
// fault.State.
func ParseRecord(text string) (Record, error) {
	fields := strings.Split(text, " ")
	if fields[0] != recordVersion {
		return Record{}, fault.New(fault.State,
			"the ownership record %q is of a version that this program does not know; use a newer one, or "+
				"remove it with `setfattr -x %s`", text, Attribute)
	}
	bad := fault.New(fault.State,
		"the ownership record %q makes no sense; if the volume is well otherwise, remove it with `setfattr -x %s`",
		text, Attribute)
	if len(fields) != 3 {
		return Record{}, bad
	}
	group, ok := strings.CutPrefix(fields[1], "group=")
	if !ok {
		return Record{}, bad
	}
	gid, err := ParseGroup(group)
	if err != nil {
		return Record{}, bad
	}
	switch fields[2] {
	case "state=clean":
		return Record{Group: gid, Clean: true}, nil
	case "state=dirty":
		return Record{Group: gid}, nil
	}
	return Record{}, bad
}

// ParseGroup parses a group from an orchestrator: one plain decimal number, 0 to 4294967294.
func ParseGroup(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n == 1<<32-1 || strconv.FormatUint(n, 10) != text {
		return 0, fault.New(fault.Invalid, "%q is no group: a plain decimal number from 0 to 4294967294 is one", text)
	}
	return uint32(n), nil
}

// read returns the root's record. If there is none, ok is false.
func read(root linux.Dir) (r Record, ok bool, err error) {
	b, err := root.Getxattr(Attribute)
	if err != nil || b == nil {
		return Record{}, false, err
	}
	r, err = ParseRecord(string(b))
	return r, err == nil, err
}

// write records it on the root. A volume that has no room for it gets no record, and loses an earlier one: then each Apply walks.
func (r Record) write(root linux.Dir) error {
	err := root.Setxattr(Attribute, []byte(r.String()))
	if errors.Is(err, linux.ENOSPC) || errors.Is(err, linux.EDQUOT) {
		return root.Removexattr(Attribute)
	}
	return err
}
