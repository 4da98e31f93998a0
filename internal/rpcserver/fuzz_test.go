package rpcserver

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

type nobody struct{}

func (nobody) Started(string) func(string) { return func(string) {} }

// FuzzLog: whatever a caller sends, the log has one line about the call, as text and as JSON, and
// none of the caller's secrets.
func FuzzLog(f *testing.F) {
	var all []protoreflect.MessageType
	protoregistry.GlobalTypes.RangeMessages(func(m protoreflect.MessageType) bool {
		d := m.Descriptor()
		if s := d.Fields().ByName("secrets"); d.ParentFile().Package() == "csi.v1" && s != nil && s.IsMap() {
			all = append(all, m)
		}
		return true
	})
	slices.SortFunc(all, func(a, b protoreflect.MessageType) int {
		return strings.Compare(string(a.Descriptor().FullName()), string(b.Descriptor().FullName()))
	})
	if len(all) < 8 {
		f.Fatalf("%d requests have secrets", len(all))
	}
	seed, err := proto.Marshal(&csi.NodeStageVolumeRequest{VolumeId: "v\n\x1b[2J", StagingTargetPath: "/s",
		VolumeContext: map[string]string{"a": "b\nlevel=ERROR"}})
	if err != nil {
		f.Fatal(err)
	}
	for i := range all {
		f.Add(uint8(i), seed, "password", "it failed\nlevel=ERROR", i%2 == 0)
	}
	f.Fuzz(func(t *testing.T, which uint8, b []byte, key, failure string, json bool) {
		const secret = "hunter2-do-not-tell"
		m := all[int(which)%len(all)].New()
		if proto.Unmarshal(b, m.Interface()) != nil || bytes.Contains(b, []byte(secret)) || strings.Contains(failure, secret) ||
			strings.Contains(key, secret) {
			return
		}
		m.Mutable(m.Descriptor().Fields().ByName("secrets")).Map().Set(protoreflect.ValueOfString(key).MapKey(),
			protoreflect.ValueOfString(secret))
		format := "text"
		if json {
			format = "json"
		}
		var log bytes.Buffer
		i := &interceptor{log: Logger(&log, format, 5), metrics: nobody{}}
		var failed error
		if failure != "" {
			failed = errors.New(failure)
		}
		_, err := i.unary(context.Background(), m.Interface(), &grpc.UnaryServerInfo{FullMethod: "/csi.v1.Node/NodeStageVolume"},
			func(context.Context, any) (any, error) { return nil, failed })
		if (err != nil) != (failed != nil) || err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("%q became %v", failure, err)
		}
		if strings.Contains(log.String(), secret) {
			t.Errorf("%s: the log has the secret: %s", m.Descriptor().Name(), &log)
		}
		if strings.Count(log.String(), "\n") != 1 || strings.Contains(log.String(), "\x1b") {
			t.Errorf("%s: not one line of text: %q", m.Descriptor().Name(), &log)
		}
	})
}
