package ownership

import "testing"

// A pod can give millions of files a second name, and the process of the walk serves all pods.
func TestF02_SecondNamesTakeBoundedMemory(t *testing.T) {
	s := seen{most: 3}
	for round := range 2 {
		for ino := range uint64(5) {
			if known := s.before(file{1, ino}); known != (round == 1 && ino < 3) {
				t.Errorf("round %d, inode %d: known %v", round, ino, known)
			}
		}
	}
	if len(s.files) != 3 {
		t.Errorf("%d files are remembered", len(s.files))
	}
}
