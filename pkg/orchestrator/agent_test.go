package orchestrator

import (
	"strings"
	"testing"

	"google.golang.org/grpc"
)

// C22: an agent that could not work is not made.
func TestC22_AnAgentWantsItsParts(t *testing.T) {
	whole := Config{Driver: &grpc.ClientConn{}, Pods: &Pods{}, Records: &Records{}}
	for name, without := range map[string]func(*Config){
		"Driver":  func(c *Config) { c.Driver = nil },
		"Pods":    func(c *Config) { c.Pods = nil },
		"Records": func(c *Config) { c.Records = nil },
	} {
		c := whole
		without(&c)
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: %v", name, err)
		}
	}
	a, err := New(whole)
	ok(t, err)
	ok(t, a.Close())
}
