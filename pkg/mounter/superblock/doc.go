// Package superblock tells what is on a block device, by reading it and
// nothing else. There are three answers:
//
//   - Blank: every byte looked at is zero, at the places where any file system,
//     partition table or volume manager keeps its marks and their copies;
//   - Known: exactly one format was recognised, and its own checks hold;
//   - Unknown: anything else: damaged, ambiguous, unfinished or foreign data.
//
// Unknown is never Blank: other tools' "I found nothing" has cost people their
// data (kubernetes/kubernetes#140376). And a probe looks at places: it says what
// a device is not. Formatting needs a BlankDevice, and a probe alone makes none:
// see there.
package superblock
