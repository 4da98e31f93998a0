package main

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A guest may boot for longer than crustd waits for one answer. An end of the guest, or of the user's patience, ends the wait.
func TestFleet_SandboxRunWaitsForASlowBoot(t *testing.T) {
	for name, c := range map[string]struct {
		answers      []codes.Code
		want         codes.Code
		calls, still int
	}{
		"a quick boot":     {[]codes.Code{codes.OK}, codes.OK, 1, 0},
		"a slow boot":      {[]codes.Code{codes.DeadlineExceeded, codes.DeadlineExceeded, codes.OK}, codes.OK, 3, 2},
		"the guest ends":   {[]codes.Code{codes.DeadlineExceeded, codes.NotFound}, codes.NotFound, 2, 1},
		"nobody waits now": {[]codes.Code{codes.DeadlineExceeded, codes.Canceled}, codes.DeadlineExceeded, 2, 1},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			calls, still := 0, 0
			err := booted(ctx, func() error {
				code := c.answers[calls]
				calls++
				if code == codes.Canceled {
					cancel()
					code = codes.DeadlineExceeded
				}
				return status.Error(code, "")
			}, func() { still++ })
			if status.Code(err) != c.want || calls != c.calls || still != c.still {
				t.Errorf("%v after %d calls; said %d times that it still boots", err, calls, still)
			}
			cancel()
		})
	}
}
