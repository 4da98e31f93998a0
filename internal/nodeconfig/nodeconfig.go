// Package nodeconfig is the configuration of csi-node: what its flags and its configuration file
// give a node, and which parts may change while csi-node runs.
package nodeconfig

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// The header of a configuration file.
const (
	APIVersion = "csi.crust.dev/v1alpha1"
	Kind       = "NodeConfig"
)

// Config is a configuration file. A nil list is absent from the file; an empty list is present, and
// means none.
type Config struct {
	APIVersion   string     `json:"apiVersion"`
	Kind         string     `json:"kind"`
	Logging      *Logging   `json:"logging,omitempty"`
	Pools        []PoolItem `json:"pools,omitzero"`
	AllowDevices []string   `json:"allowDevices,omitzero"`
	Nodes        []NodeItem `json:"nodes,omitzero"`
}

// Logging configures the log.
type Logging struct {
	Verbosity *int `json:"verbosity,omitempty"`
}

// PoolItem is a pool.
type PoolItem struct {
	Name       string   `json:"name"`
	Path       string   `json:"path"`
	Overcommit *float64 `json:"overcommit,omitempty"`
	Reserve    *string  `json:"reserve,omitempty"`
}

// NodeItem overrides the top level for nodes with certain labels.
type NodeItem struct {
	Name         string     `json:"name"`
	Selector     *Selector  `json:"selector,omitempty"`
	Pools        []PoolItem `json:"pools,omitzero"`
	AllowDevices []string   `json:"allowDevices,omitzero"`
}

// maxVerbosity is the highest value of -v.
const maxVerbosity = 5

// check validates the whole file, including entries for other nodes.
func (c *Config) check() error {
	if c.Logging != nil && c.Logging.Verbosity != nil && (*c.Logging.Verbosity < 0 || *c.Logging.Verbosity > maxVerbosity) {
		return fmt.Errorf("logging.verbosity is %d; it is a number from 0 to %d", *c.Logging.Verbosity, maxVerbosity)
	}
	if err := checkLists(c.Pools, c.AllowDevices); err != nil {
		return err
	}
	names := map[string]bool{}
	for i, n := range c.Nodes {
		at := fmt.Sprintf("nodes[%d]", i)
		if n.Name == "" {
			return fmt.Errorf("%s has no name: give it one, for logs and errors", at)
		}
		at = fmt.Sprintf("%s (%q)", at, n.Name)
		if names[n.Name] {
			return fmt.Errorf("%s: another entry has the same name", at)
		}
		names[n.Name] = true
		if _, err := n.Selector.compile(); err != nil {
			return fmt.Errorf("%s: selector: %w", at, err)
		}
		if n.Pools == nil && n.AllowDevices == nil {
			return fmt.Errorf("%s gives its nodes nothing: give it pools, or allowDevices", at)
		}
		if err := checkLists(n.Pools, n.AllowDevices); err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
	}
	return nil
}

func checkLists(pools []PoolItem, devices []string) error {
	list, err := readPools(pools)
	if err != nil {
		return err
	}
	if err := CheckPools(list); err != nil {
		return err
	}
	for _, pattern := range devices {
		if err := mounter.Pattern(pattern).Check(); err != nil {
			return fmt.Errorf("allowDevices: %w", err)
		}
	}
	return nil
}

func readPools(items []PoolItem) ([]Pool, error) {
	var list []Pool
	for i, item := range items {
		p, err := item.pool()
		if err != nil {
			return nil, fmt.Errorf("pools[%d]: %w", i, err)
		}
		list = append(list, p)
	}
	return list, nil
}

// Settings are the settings of one node.
type Settings struct {
	Entry        string // name of the entry in nodes; empty for the top level, or flags
	Pools        []Pool // the first is the default
	AllowDevices []string
	Verbosity    int
}

// choose returns the file's settings for a node with these labels. A nil list is set nowhere.
func (c *Config) choose(labels map[string]string) (Settings, error) {
	s := Settings{AllowDevices: c.AllowDevices, Verbosity: -1}
	if c.Logging != nil && c.Logging.Verbosity != nil {
		s.Verbosity = *c.Logging.Verbosity
	}
	pools := c.Pools
	var matching []string
	for _, n := range c.Nodes {
		selector, err := n.Selector.compile()
		if err != nil {
			return Settings{}, err
		}
		if !selector.Matches(labelSet(labels)) {
			continue
		}
		matching = append(matching, fmt.Sprintf("%q", n.Name))
		s.Entry = n.Name
		if n.Pools != nil {
			pools = n.Pools
		}
		if n.AllowDevices != nil {
			s.AllowDevices = n.AllowDevices
		}
	}
	switch {
	case len(matching) > 1:
		return Settings{}, fmt.Errorf("the entries %s of nodes all match this node, which %s: "+
			"change a selector or a label, so that one does",
			strings.Join(matching, ", "), c.labelsAskedFor(labels))
	case len(matching) == 0 && c.Pools == nil && slices.ContainsFunc(c.Nodes, func(n NodeItem) bool { return n.Pools != nil }):
		return Settings{}, fmt.Errorf("no entry of nodes matches this node, which %s; "+
			"and the top level, which all other nodes have, has no pools: "+
			"label the node, add an entry, or give pools at the top level ([] for none)", c.labelsAskedFor(labels))
	}
	list, err := readPools(pools)
	if list == nil && pools != nil {
		list = []Pool{}
	}
	s.Pools = list
	return s, err
}

// labelsAskedFor describes which of the labels in selectors a node has.
func (c *Config) labelsAskedFor(labels map[string]string) string {
	var has, lacks []string
	for _, key := range c.keys() {
		if value, ok := labels[key]; ok {
			has = append(has, key+"="+value)
		} else {
			lacks = append(lacks, key)
		}
	}
	var parts []string
	if len(has) > 0 {
		parts = append(parts, "has "+strings.Join(has, ", "))
	}
	if len(lacks) > 0 {
		parts = append(parts, "lacks the label "+strings.Join(lacks, ", "))
	}
	return strings.Join(parts, " and ")
}

func (c *Config) keys() []string {
	var keys []string
	for _, n := range c.Nodes {
		keys = append(keys, n.Selector.keys()...)
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

var errNothing = errors.New("give at least one --pool NAME=loop:DIR, or --allow-device GLOB, " +
	"or a --config FILE that has pools or allowDevices for this node")
