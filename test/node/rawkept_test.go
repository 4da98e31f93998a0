package node

import (
	"bytes"
	"crypto/rand"
	"io"
	"os"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A04: if a program has a disk to itself, its last close writes its data to the disk. But csi-node
// also has a raw volume's device open.
func TestA04_WhatAPodWroteWithoutFsyncIsKeptByUnstage(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	for _, v := range []csiclient.Volume{{Block: true}, {FSType: "ext4"}, {FSType: "xfs"}} {
		v, target := up(t, n, "a", v)
		file := target
		if !v.Block {
			file += "/f"
		}
		data := make([]byte, 8<<20)
		rand.Read(data)
		f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
		ok(t, err)
		_, err = f.Write(data)
		ok(t, err)
		ok(t, f.Close())
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, target, false))
		got := make([]byte, len(data))
		f, err = os.Open(file)
		ok(t, err)
		_, err = io.ReadFull(f, got)
		ok(t, err)
		ok(t, f.Close())
		if !bytes.Equal(got, data) {
			t.Errorf("%+v lost what was written to it", v)
		}
		down(t, n, v.ID, target)
	}
}
