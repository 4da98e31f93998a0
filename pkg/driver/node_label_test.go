package driver

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// S04: an event names no pod of another namespace; the log names all.
func TestS04_UsersOfOtherNamespacesAreForTheLog(t *testing.T) {
	for _, c := range []struct {
		pods           []string
		public, detail string
	}{
		{nil, "", ""},
		{[]string{"shop/web-1", "shop/web-0"}, "; it is used by web-0, web-1 of this namespace", "used by shop/web-0, shop/web-1"},
		{[]string{"shops/web-0"}, "; it is used by a pod of another namespace", "used by shops/web-0"},
		{[]string{"web-0"}, "; it is used by a pod of another namespace", "used by web-0"},
		{[]string{"shop/web-0", "bank/till"}, "; it is used by web-0 of this namespace, and by a pod of another",
			"used by bank/till, shop/web-0"},
	} {
		if got := sayUsers(c.pods, "shop"); got.Public != c.public || got.Detail != c.detail {
			t.Errorf("%v: %q, %q", c.pods, got.Public, got.Detail)
		}
	}
	if got := sayUsers([]string{"web-0"}, ""); got.Public != "; it is used by a pod of another namespace" {
		t.Errorf("a pod of no namespace is named: %q", got.Public)
	}
}

// S09: metrics of labels use the kubelet's names of access modes.
func TestS09_AccessModesHaveTheKubeletsNames(t *testing.T) {
	want := map[csi.VolumeCapability_AccessMode_Mode]string{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: "RWOP",
		csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        "RWO",
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  "RWO",
		csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:    "ROX",
		csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER:   "RWX",
	}
	for mode := range csi.VolumeCapability_AccessMode_Mode_name {
		m := csi.VolumeCapability_AccessMode_Mode(mode)
		w, known := want[m]
		if !known {
			w = "other"
		}
		if got := accessMode(m); got != w {
			t.Errorf("%s is %s, want %s", m, got, w)
		}
	}
}
