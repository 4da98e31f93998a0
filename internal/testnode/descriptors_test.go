package testnode

import (
	"slices"
	"testing"
)

func TestOnlyWhatCameLaterIsALeak(t *testing.T) {
	before := []string{"/dev/loop-control", "/dev/null", "/dev/null"}
	if got := added(before, []string{"/dev/null", "/dev/null"}); len(got) > 0 {
		t.Errorf("a closed descriptor counts: %q", got)
	}
	after := []string{"/a", "/dev/loop-control", "/dev/null", "/dev/null", "/dev/null"}
	if got := added(before, after); !slices.Equal(got, []string{"/a", "/dev/null"}) {
		t.Errorf("%q", got)
	}
}
