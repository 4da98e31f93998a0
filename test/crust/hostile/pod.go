package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/vport"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// hugeForMonitor is four times the longest message that a pod's monitor takes. Much more, and an emulated guest would not get to send it
// in the time of a call, or not have the memory.
const hugeForMonitor = 16 << 20

// podAgent takes the place of the agent of a pod's containers. The file /mode has the mode, which the test changes.
type podAgent struct{ guestv1.UnimplementedPodServer }

// attackAsPod stops the agent, because the guest ends with it, and takes its port.
func attackAsPod() error {
	pid, err := agentOfPod()
	if err != nil {
		return err
	}
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return err
	}
	port, err := portOf(pid)
	if err != nil {
		return err
	}
	fmt.Println("hostile: it has the pod's port")
	a := &podAgent{}
	const most = 1 << 30
	g := grpc.NewServer(grpc.MaxSendMsgSize(most))
	guestv1.RegisterPodServer(g, a)
	return g.Serve(noisy{vport.Listen(port, magic()), a})
}

func agentOfPod() (int, error) {
	names, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range names {
		b, _ := os.ReadFile(name)
		if strings.HasPrefix(string(b), "/proc/self/exe\x00--pod\x00") {
			return strconv.Atoi(strings.Split(name, "/")[2])
		}
	}
	return 0, errors.New("there is no agent of a pod")
}

// portOf copies the descriptor of the port that a process has open: a port can be opened once only.
func portOf(pid int) (*os.File, error) {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, err
	}
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, l := range links {
		if to, _ := os.Readlink(l); strings.HasPrefix(to, "/dev/vport") {
			number, _ := strconv.Atoi(filepath.Base(l))
			fd, err := unix.PidfdGetfd(process, number, 0)
			return os.NewFile(uintptr(fd), to), err
		}
	}
	return nil, errors.New("the agent has no port")
}

func (*podAgent) now() string {
	b, _ := os.ReadFile("/mode")
	return strings.TrimSpace(string(b))
}

func (a *podAgent) text() string {
	switch a.now() {
	case "huge":
		return strings.Repeat("A", hugeForMonitor)
	case "silent":
		select {}
	}
	return "\x1b[2J\u202e../../../../etc/passwd\x00\n\r" + strings.Repeat("B", 100<<10)
}

func (a *podAgent) CreateContainer(context.Context, *guestv1.CreateContainerRequest) (*guestv1.CreateContainerResponse, error) {
	if a.now() == "huge" {
		return nil, errors.New(a.text())
	}
	return &guestv1.CreateContainerResponse{}, nil // there is none
}

func (a *podAgent) PrepareProcess(context.Context, *guestv1.PrepareProcessRequest) (*guestv1.PrepareProcessResponse, error) {
	return &guestv1.PrepareProcessResponse{Token: a.text()}, nil
}

func (a *podAgent) Run(stream guestv1.Pod_RunServer) error {
	for range 3 {
		_ = stream.Send(&guestv1.RunResponse{What: &guestv1.RunResponse_Started{Started: true}})
	}
	for range 20 {
		_ = stream.Send(&guestv1.RunResponse{What: &guestv1.RunResponse_Stdout{Stdout: make([]byte, 1<<20)}})
	}
	_ = stream.Send(&guestv1.RunResponse{}) // nothing
	return stream.Send(&guestv1.RunResponse{What: &guestv1.RunResponse_ExitStatus{ExitStatus: -5}})
}

func (a *podAgent) Control(context.Context, *guestv1.ControlRequest) (*guestv1.ControlResponse, error) {
	return nil, errors.New(a.text())
}

func (a *podAgent) DeleteContainer(context.Context, *guestv1.DeleteContainerRequest) (*guestv1.DeleteContainerResponse, error) {
	return nil, errors.New(a.text())
}

func (a *podAgent) End(context.Context, *guestv1.EndRequest) (*guestv1.EndResponse, error) {
	return nil, errors.New(a.text())
}

// Ports opens and closes thousands.
func (a *podAgent) Ports(_ *guestv1.PortsRequest, stream guestv1.Pod_PortsServer) error {
	for {
		r := &guestv1.PortsResponse{Ports: []*guestv1.Port{{Number: 5353, Udp: true}}} // the test sends to this one
		for range 20_000 {
			r.Ports = append(r.Ports, &guestv1.Port{Number: rand.Uint32(), Loopback: rand.IntN(2) == 0, Udp: rand.IntN(2) == 0})
		}
		if err := stream.Send(r); err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// Connect sends without end.
func (a *podAgent) Connect(stream guestv1.Pod_ConnectServer) error {
	for {
		if err := stream.Send(&guestv1.ConnectResponse{Data: make([]byte, 64<<10)}); err != nil {
			return err
		}
	}
}

// Datagrams sends without end, to clients that there are and to others, and takes nothing but the first.
func (a *podAgent) Datagrams(stream guestv1.Pod_DatagramsServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	fmt.Println("hostile: it has a datagram")
	for {
		for _, to := range []uint64{first.GetClient(), rand.Uint64()} {
			if err := stream.Send(&guestv1.DatagramsResponse{Client: to, Data: make([]byte, 60<<10)}); err != nil {
				return err
			}
		}
	}
}
