// Command hostile takes the agent's place in a microVM, as a guest's root can, and gives harmful
// answers: texts of 100 MiB, escape sequences, negative numbers, paths that lead elsewhere, nothing
// at all, noise. Meanwhile the clock jumps.
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/channel"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

const huge = 100 << 20

func main() {
	if os.Args[1] == "pod" {
		fmt.Println("hostile:", attackAsPod())
		return
	}
	a := &agent{}
	a.mode.Store(os.Args[1])
	go func() {
		for year := int64(0); ; year++ {
			tv := syscall.Timeval{Sec: year % 130 * 365 * 24 * 3600}
			_ = syscall.Settimeofday(&tv)
			time.Sleep(50 * time.Millisecond)
		}
	}()
	for {
		killAgents()
		l, err := channel.Listen("", magic(), 0)
		if err != nil {
			fmt.Println("hostile:", err)
			continue
		}
		a.tell()
		g := grpc.NewServer()
		guestv1.RegisterGuestServer(g, a)
		fmt.Println("hostile:", g.Serve(noisy{l, a}))
	}
}

// noisy is a listener whose connections send noise in that mode.
type noisy struct {
	net.Listener
	a interface{ now() string }
}

func (n noisy) Accept() (net.Conn, error) {
	c, err := n.Listener.Accept()
	for err == nil && n.a.now() == "noise" {
		_, cerr := io.Copy(c, rand.Reader)
		fmt.Println("hostile:", cerr)
		c, err = n.Listener.Accept()
	}
	return c, err
}

func magic() []byte {
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		panic(err)
	}
	_, text, _ := strings.Cut(string(line), "crust.magic=")
	b, err := hex.DecodeString(strings.Fields(text)[0])
	if err != nil {
		panic(err)
	}
	return b
}

// killAgents kills the agents and the processes that took their place before.
func killAgents() {
	names, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, name := range names {
		pid, _ := strconv.Atoi(strings.Split(name, "/")[2])
		exe, _ := os.Readlink(name)
		if pid > 1 && pid != os.Getpid() && (exe == "/init" || exe == "/hostile") {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

type agent struct {
	guestv1.UnimplementedGuestServer
	mode atomic.Value // a string; Exec changes it
}

func (a *agent) now() string { return a.mode.Load().(string) }

// tell tells the test who has the port.
func (a *agent) tell() { fmt.Printf("hostile: it has the port; mode %s\n", a.mode.Load()) }

func (a *agent) text() string {
	switch a.mode.Load() {
	case "huge":
		return strings.Repeat("A", huge)
	case "silent":
		select {}
	}
	return "\x1b[2J\u202e../../../../etc/passwd\x00\n\r" + strings.Repeat("B", 5<<10) // crustd takes that much
}

func (a *agent) Info(context.Context, *guestv1.InfoRequest) (*guestv1.InfoResponse, error) {
	r := &guestv1.InfoResponse{Kernel: a.text()}
	for i := range 1000 {
		r.FileSystems = append(r.FileSystems, fmt.Sprint("fs", i, "\x1b"))
		r.Volumes = append(r.Volumes, &guestv1.MountedVolume{Serial: "../x", Path: "/etc", Device: "/dev/vda"})
	}
	return r, nil
}

func (a *agent) Mount(context.Context, *guestv1.MountRequest) (*guestv1.MountResponse, error) {
	return &guestv1.MountResponse{Path: a.text(), Device: a.text()}, nil
}

func (a *agent) Unmount(context.Context, *guestv1.UnmountRequest) (*guestv1.UnmountResponse, error) {
	if a.mode.Load() != "lies" {
		a.text()
	}
	return &guestv1.UnmountResponse{}, nil // it stays mounted
}

func (a *agent) Stats(context.Context, *guestv1.StatsRequest) (*guestv1.StatsResponse, error) {
	return &guestv1.StatsResponse{
		TotalBytes: math.MinInt64, AvailableBytes: math.MaxInt64, UsedBytes: -1, TotalInodes: -1, AvailableInodes: math.MinInt64,
		Ailment: a.text(),
	}, nil
}

func (a *agent) Grow(context.Context, *guestv1.GrowRequest) (*guestv1.GrowResponse, error) {
	return nil, fmt.Errorf("%s", a.text())
}

func (a *agent) Resolve(context.Context, *guestv1.ResolveRequest) (*guestv1.ResolveResponse, error) {
	return &guestv1.ResolveResponse{Path: a.text()}, nil
}

func (a *agent) Exec(_ context.Context, r *guestv1.ExecRequest) (*guestv1.ExecResponse, error) {
	if argv := r.GetArgv(); len(argv) == 3 && strings.HasPrefix(argv[2], "/hostile ") {
		a.mode.Store(strings.Fields(argv[2])[1])
		a.tell()
	}
	return &guestv1.ExecResponse{Output: []byte(a.text()), ExitCode: -1}, nil
}
