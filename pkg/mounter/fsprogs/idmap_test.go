package fsprogs

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// A refusal by the kernel is "no"; any other error is "cannot tell".
func TestU01_WhatCannotBeMappedIsReported(t *testing.T) {
	for _, c := range []struct {
		err  error
		want mounter.Answer
	}{
		{nil, mounter.Yes},
		{fmt.Errorf("xfs on /dev/loop1: %w (Linux 5.10)", mounter.ErrNoIdmap), mounter.No},
		{fmt.Errorf("xfs on /dev/loop1: %w", mounter.ErrNoMountSetattr), mounter.No},
		{errors.New("mkfs.xfs: exit status 1"), mounter.CannotTell},
	} {
		got, why := idmapAnswer(c.err)
		if got != c.want || (c.err == nil) != (why == "") {
			t.Errorf("%v: %v, %q", c.err, got, why)
		}
		f := mounter.Feature{Name: "idmapped mounts of xfs", Answer: got, Why: why, Cost: "no pod with hostUsers: false"}
		if told := mounter.Summary([]mounter.Feature{f}); c.want == mounter.No &&
			!strings.Contains(told, fmt.Sprintf("idmapped mounts of xfs: no (%s; so: %s)", why, f.Cost)) {
			t.Errorf("the summary is %q", told)
		}
	}
}

// For a file system that the kernel lacks, no program runs to find that out.
func TestU01_WhatThisKernelLacksCannotBeMapped(t *testing.T) {
	p := New(func(program string) { t.Errorf("%s was started", program) })
	f := p.ProbeIdmap(t.Context(), "nothing", t.TempDir(), "")
	if f.Answer != mounter.No || !strings.Contains(f.Why, "this kernel has no nothing") {
		t.Errorf("%+v", f)
	}
}
