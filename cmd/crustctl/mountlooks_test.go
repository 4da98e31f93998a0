package main

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A mount that does not answer is left alone until it does.
func TestB08_ALookThatHangsIsNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l mountLooks
		asked := 0
		answer := make(chan struct{})
		hang := func() (int, error) { asked++; <-answer; return 7, nil }
		for i, atMost := range []time.Duration{lookPatience, 0, 0} {
			begin := time.Now()
			if n, err := lookWithin(&l, "/dead", hang); err == nil || n != 0 {
				t.Errorf("look %d: %d, %v", i, n, err)
			}
			if took := time.Since(begin); took > atMost {
				t.Errorf("look %d took %s", i, took)
			}
			if n, err := lookWithin(&l, "/other", func() (int, error) { return 8, nil }); err != nil || n != 8 {
				t.Errorf("at another: %d, %v", n, err)
			}
		}
		if asked != 1 {
			t.Errorf("%d looks", asked)
		}
		close(answer)
		synctest.Wait()
		if n, err := lookWithin(&l, "/dead", hang); err != nil || n != 7 {
			t.Errorf("when it answers: %d, %v", n, err)
		}
		broken := errors.New("broken")
		if _, err := lookWithin(&l, "/dead", func() (int, error) { return 0, broken }); err != broken {
			t.Errorf("%v", err)
		}
	})
}
