package volume

// Finding is something in a pool that does not fit together.
type Finding struct {
	Kind  Kind
	ID    string // of the volume or snapshot; empty where nobody can tell
	Path  string // of the file that it was seen at
	Means string
	Do    string
}

// Kind of a finding: one word, for people and scripts.
type Kind string

// The kinds of findings.
const (
	FileWithoutRecord Kind = "file-without-record"
	RecordWithoutFile Kind = "record-without-file"
	RecordUnusable    Kind = "record-unusable"
	FileTooShort      Kind = "file-too-short"
	FileTooLong       Kind = "file-too-long"
	Unfinished        Kind = "unfinished"
	LeftOver          Kind = "left-over"
	UnknownFile       Kind = "unknown-file"
	SnapshotAlone     Kind = "snapshot-alone"
	// StagedWithoutDevice is the driver's to find: a pool does not know what is staged.
	StagedWithoutDevice Kind = "staged-without-device"
)

// Kinds are all of them.
func Kinds() []Kind {
	return []Kind{FileWithoutRecord, RecordWithoutFile, RecordUnusable, FileTooShort, FileTooLong, Unfinished, LeftOver, UnknownFile,
		SnapshotAlone, StagedWithoutDevice}
}
