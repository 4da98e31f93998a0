package main

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/privatesocket"
	"github.com/crust-csi/crust-csi/pkg/orchestrator"
)

var benchPod = map[string]string{
	"csi.storage.k8s.io/pod.name": "p", "csi.storage.k8s.io/pod.namespace": "ns", "csi.storage.k8s.io/pod.uid": "u",
}

// serveAgent runs crust-agent in its own process, with an API server in memory.
func serveAgent(driver, endpoint string) {
	conn, err := orchestrator.Dial(driver)
	must(err)
	records, err := orchestrator.LoadRecords(filepath.Dir(strings.TrimPrefix(endpoint, "unix://"))+"/deferrals", "boot")
	must(err)
	client := fake.NewClientset(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u"},
		Spec: corev1.PodSpec{NodeName: "bench"}})
	a, err := orchestrator.New(orchestrator.Config{
		Driver: conn, Pods: orchestrator.WatchPods(context.Background(), client, "bench"), Records: records,
		Events: record.NewFakeRecorder(10), Log: slog.New(slog.DiscardHandler),
	})
	must(err)
	l, err := privatesocket.Listen(endpoint, 0o600)
	must(err)
	must(a.Proxy().Server().Serve(l))
}

// agent compares calls through crust-agent with direct calls.
func (b *bench) agent() {
	socket := "unix://" + b.dir + "/agent.sock"
	c := exec.Command(os.Args[0], "-serve-agent", "unix://"+b.dir+"/csi.sock,"+socket)
	c.Stderr = os.Stderr
	c.SysProcAttr = linux.KilledWithThread()
	must(c.Start())
	defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
	through, err := csiclient.Dial(socket, b.kubelet)
	must(err)
	defer through.Close()
	for range 500 {
		if _, err = through.Probe(ctx, &csi.ProbeRequest{}); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	must(err)
	made, err := b.c.Create(ctx, "agent", 64<<20, csiclient.Volume{FSType: "ext4"}, nil, nil)
	must(err)
	v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4", Context: benchPod}
	must(b.c.Stage(ctx, v))
	first, target := b.kubelet+"/pods/a/volumes/first/mount", b.kubelet+"/pods/a/volumes/second/mount"
	for _, t := range []string{first, target} {
		must(os.MkdirAll(filepath.Dir(t), 0o755))
	}
	must(b.c.Publish(ctx, v, first, false))
	s := series{}
	for range *rounds * 20 {
		for name, c := range map[string]*csiclient.Client{"direct": b.c, "agent": through} {
			s.time(name+" empty", func() { _, err := c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}); must(err) })
			s.time(name+" publish", func() { must(c.Publish(ctx, v, target, false)) })
			s.time(name+" stats", func() {
				_, err := c.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: target})
				must(err)
			})
			s.time(name+" unpublish", func() { must(c.Unpublish(ctx, v.ID, target)) })
		}
	}
	// The kubelet opens a connection for each call.
	for range *rounds * 5 {
		for name, endpoint := range map[string]string{"direct": "unix://" + b.dir + "/csi.sock", "agent": socket} {
			call := func(what string, f func(*csiclient.Client)) {
				s.time(name+" "+what+" of the kubelet", func() {
					c, err := csiclient.Dial(endpoint, b.kubelet)
					must(err)
					f(c)
					must(c.Close())
				})
			}
			call("empty", func(c *csiclient.Client) { _, err := c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}); must(err) })
			call("publish", func(c *csiclient.Client) { must(c.Publish(ctx, v, target, false)) })
			call("stats", func(c *csiclient.Client) {
				_, err := c.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: target})
				must(err)
			})
			call("unpublish", func(c *csiclient.Client) { must(c.Unpublish(ctx, v.ID, target)) })
		}
	}
	// One after the other, as the kubelet does with a pod's volume.
	for range *rounds {
		for name, c := range map[string]*csiclient.Client{"direct": b.c, "agent": through} {
			must(b.c.Unpublish(ctx, v.ID, first))
			must(b.c.Unstage(ctx, v.ID))
			s.time(name+" pod", func() {
				must(c.Stage(ctx, v))
				must(c.Publish(ctx, v, first, false))
			})
		}
	}
	b.row("stage + first publish through crust-agent", "the same without it", s.median("direct pod"), s.median("agent pod"), 1.6, false)
	for _, name := range []string{"publish", "unpublish", "stats", "empty"} {
		b.row(name+" through crust-agent, a connection a call as the kubelet makes", "the same without it",
			s.median("direct "+name+" of the kubelet"), s.median("agent "+name+" of the kubelet"), 1.6, false)
	}
	for _, name := range []string{"publish", "unpublish", "stats", "empty"} {
		b.row(name+" through crust-agent, all in one connection", "the same without it", s.median("direct "+name),
			s.median("agent "+name), 0, false)
	}
	must(b.c.Unpublish(ctx, v.ID, first))
	must(b.c.Unstage(ctx, v.ID))
	must(b.c.Delete(ctx, v.ID))
}
