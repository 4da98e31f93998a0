package volume

// Finding is an inconsistency in a pool.
type Finding struct {
	Kind  Kind
	ID    string // of the volume or snapshot; empty if unknown
	Path  string // the file concerned
	Means string
	Do    string
}

// Kind is the kind of a finding: one word, for people and scripts.
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
	// StagedWithoutDevice is found by the driver, because a pool does not know what is staged.
	StagedWithoutDevice Kind = "staged-without-device"
)

// Kinds lists all kinds.
func Kinds() []Kind {
	return []Kind{FileWithoutRecord, RecordWithoutFile, RecordUnusable, FileTooShort, FileTooLong, Unfinished, LeftOver, UnknownFile,
		SnapshotAlone, StagedWithoutDevice}
}
