package sandbox

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// hangs is a sandbox whose volumes do not answer before they are released.
type hangs struct {
	Sandbox
	inside, release chan struct{}
}

func (s hangs) Stats(context.Context, Volume) (mounter.Usage, string, error) {
	s.inside <- struct{}{}
	<-s.release
	return mounter.Usage{}, "", nil
}

func (hangs) Detach() {}

// C16: a kubelet asks for stats every minute. A disk that hangs keeps one thread of crustd for a volume, not one for each call. At 10,000
// of them Go ends the process.
func TestC16_AHungDiskKeepsOneLook(t *testing.T) {
	m, _ := manager(t, sandboxRecord{Spec: Spec{ID: "pod", reach: "{}"}, Volumes: map[string]volumeRecord{
		"/dev/a": {State: published, Type: "ext4"}, "/dev/b": {State: published, Type: "ext4"}}})
	s := hangs{inside: make(chan struct{}), release: make(chan struct{})}
	m.sandboxes["pod"].set(s)
	m.Timeout = time.Hour
	ended := make(chan error, 4)
	// look returns why a look does not begin.
	look := func(source string) error {
		go func() {
			_, _, err := m.Stats(t.Context(), "pod", source)
			ended <- err
		}()
		select {
		case <-s.inside:
			return nil
		case err := <-ended:
			return err
		}
	}
	if err := errors.Join(look("/dev/a"), look("/dev/a")); err != nil {
		t.Errorf("beside one that is slow, perhaps: %v", err)
	}
	m.Timeout = 1 // a nanosecond: the first one has taken longer
	err := look("/dev/a")
	if !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "/dev/a") || !strings.Contains(err.Error(), "dmesg") {
		t.Errorf("a third one: %v", err)
	}
	if err := look("/dev/b"); err != nil {
		t.Errorf("another volume: %v", err)
	}
	close(s.release)
	for range 3 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if err := look("/dev/a"); err != nil {
		t.Errorf("after the disk has come back: %v", err)
	}
}
