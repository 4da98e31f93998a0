// Package superblock determines what is on a block device. It only reads. There are three
// answers:
//
//   - Blank: all bytes examined are zero, at the places where file systems, partition tables
//     and volume managers keep their signatures and copies of them;
//   - Known: exactly one format was recognized, and its own checks pass;
//   - Unknown: everything else: damaged, ambiguous, unfinished or foreign data.
//
// Unknown is never Blank: other tools' "I found nothing" has destroyed data
// (kubernetes/kubernetes#140376). A probe examines only some places, so it shows what a device
// is not. Formatting needs a BlankDevice, which a probe alone does not give.
package superblock
