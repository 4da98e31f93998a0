package rpcserver

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// B10: a volume that another node has to make is routine.
func TestB10_WhatBelongsOnAnotherNodeIsNoError(t *testing.T) {
	for kind, level := range map[fault.Kind]string{fault.Elsewhere: "WARN", fault.NoSpace: "ERROR"} {
		var log bytes.Buffer
		i := &interceptor{log: Logger(&log, "text", 2), metrics: nobody{}}
		_, _ = i.unary(context.Background(), &csi.CreateVolumeRequest{Name: "a"},
			&grpc.UnaryServerInfo{FullMethod: "/csi.v1.Controller/CreateVolume"},
			func(context.Context, any) (any, error) { return nil, fault.New(kind, "not here") })
		if got := log.String(); !strings.Contains(got, "level="+level) || !strings.Contains(got, "code=ResourceExhausted") {
			t.Errorf("%s: %s", kind, got)
		}
	}
}

// B10: a StorageClass with an error is retried again and again; the log has it once, and without
// the request.
func TestB10_ARefusalIsLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	i := &interceptor{log: Logger(&log, "text", 2), metrics: nobody{}}
	call := func(name string, err error) {
		_, _ = i.unary(context.Background(), &csi.CreateVolumeRequest{Name: name, Parameters: map[string]string{"provisoning": "thin"}},
			&grpc.UnaryServerInfo{FullMethod: "/csi.v1.Controller/CreateVolume"},
			func(context.Context, any) (any, error) { return nil, err })
	}
	for range 50 {
		call("pvc-1", fault.New(fault.Invalid, "parameter \"provisoning\" is unknown"))
		call("pvc-2", fault.New(fault.Invalid, "parameter \"provisoning\" is unknown"))
		call("pvc-1", fault.New(fault.NoSpace, "the pool is full"))
	}
	text := log.String()
	if n := strings.Count(text, "\n"); n != 3 {
		t.Errorf("%d lines:\n%s", n, text)
	}
	for _, words := range []string{"level=WARN", "name=pvc-1", "name=pvc-2", "code=InvalidArgument", "code=ResourceExhausted"} {
		if !strings.Contains(text, words) {
			t.Errorf("not a word of %s:\n%s", words, text)
		}
	}
	if strings.Contains(text, "request=") {
		t.Errorf("a refusal prints the request:\n%s", text)
	}
	log.Reset()
	call("pvc-1", fault.New(fault.Internal, "the driver is wrong"))
	call("pvc-1", fault.New(fault.Internal, "the driver is wrong"))
	if strings.Count(log.String(), "request=") != 2 {
		t.Errorf("the driver's own fault is without the request, or said once:\n%s", &log)
	}
	// A failure after a success is news.
	log.Reset()
	call("pvc-1", nil)
	call("pvc-1", fault.New(fault.NoSpace, "the pool is full"))
	if !strings.Contains(log.String(), "code=ResourceExhausted") {
		t.Errorf("it fails anew, and nothing is said:\n%s", &log)
	}
}

func TestB10_WhatIsRepeatedIsSaidAgain(t *testing.T) {
	var r repeats
	now := time.Now()
	expect := func(after time.Duration, loud bool, unsaid int) {
		t.Helper()
		if gotLoud, got := r.again(now.Add(after), r.call("CreateVolume", "x"), "no"); gotLoud != loud || got != unsaid {
			t.Errorf("after %s: %v, %d unsaid, want %v, %d", after, gotLoud, got, loud, unsaid)
		}
	}
	expect(0, true, 0)
	expect(time.Second, false, 0)
	expect(repeatAfter-time.Second, false, 0)
	expect(repeatAfter, true, 2)
	expect(repeatAfter+time.Second, false, 0)
	for n := range 10 * mostRepeats { // callers can choose names
		r.again(now, r.call("CreateVolume", fmt.Sprint(n)), "no")
		r.again(now, r.call("CreateVolume", "x"), fmt.Sprint(n))
	}
	if len(r.said) > mostRepeats || len(r.said[r.call("CreateVolume", "x")]) > mostRepeats {
		t.Errorf("%d are remembered", len(r.said))
	}
}
