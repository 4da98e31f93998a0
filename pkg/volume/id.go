package volume

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// An id is <pool>.<v or s><32 hexadecimal digits>. The digits are a hash of the name that the
// orchestrator chose, so a repeated call finds the same id without an index.
var idPattern = regexp.MustCompile(`^([a-z0-9]([-a-z0-9]*[a-z0-9])?)\.([vs])([0-9a-f]{32})$`)

var poolPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

const (
	volumeKind   = "v"
	snapshotKind = "s"
)

// MaxPoolName is the maximum length of a pool's name: ids stay below CSI's 128 bytes.
const MaxPoolName = 63

// CheckPoolName returns an error if a pool cannot have that name.
func CheckPoolName(name string) error {
	if len(name) > MaxPoolName || !poolPattern.MatchString(name) {
		return fault.New(fault.Invalid, "pool name %q: use up to %d lower-case letters, digits and dashes", name, MaxPoolName)
	}
	return nil
}

// VolumeID returns the id of the volume with that name in that pool.
func VolumeID(pool, name string) string { return makeID(pool, volumeKind, name) }

// SnapshotID returns the id of the snapshot with that name in that pool.
func SnapshotID(pool, name string) string { return makeID(pool, snapshotKind, name) }

func makeID(pool, kind, name string) string {
	sum := sha256.Sum256([]byte(name))
	return pool + "." + kind + hex.EncodeToString(sum[:16])
}

// ParseID splits an id of VolumeID or SnapshotID; ok is false for any other text. The key is
// the id without the pool, and is a safe file name.
func ParseID(id string) (pool, key string, snapshot, ok bool) {
	m := idPattern.FindStringSubmatch(id)
	if m == nil || len(m[1]) > MaxPoolName {
		return "", "", false, false
	}
	return m[1], m[3] + m[4], m[3] == snapshotKind, true
}
