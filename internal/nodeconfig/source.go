package nodeconfig

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/crust-csi/crust-csi/internal/nodelabels"
)

// Flags are the command line's values of settings that the file can contain too.
type Flags struct {
	Pools          []Pool
	AllowDevices   []string
	Verbosity      int
	VerbosityGiven bool // Verbosity was set explicitly
}

// Source is where the settings of a node come from.
type Source struct {
	File       string // value of --config; may be empty
	LabelsFile string // value of --node-labels; may be empty
	Flags      Flags
}

// Load returns the settings of this node.
func (s Source) Load() (Settings, error) {
	return s.read().settings(s)
}

// contents holds the files at one moment.
type contents struct {
	config, labels       string
	configErr, labelsErr error
}

func (s Source) read() contents {
	var c contents
	if s.File != "" {
		c.config, c.configErr = readFile(s.File)
	}
	if s.LabelsFile != "" {
		c.labels, c.labelsErr = readFile(s.LabelsFile)
	}
	return c
}

// same reports whether nothing has changed.
func (c contents) same(d contents) bool {
	return c.config == d.config && c.labels == d.labels && fmt.Sprint(c.configErr, c.labelsErr) == fmt.Sprint(d.configErr, d.labelsErr)
}

func readFile(path string) (string, error) {
	// To open a FIFO waits.
	if st, err := os.Stat(path); err == nil && !st.Mode().IsRegular() {
		return "", fmt.Errorf("%s is no regular file, which can be read again later", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSize+1)) // one byte more, so that the parser can report the excess
	return string(b), err
}

func (c contents) settings(s Source) (Settings, error) {
	settings := Settings{Pools: s.Flags.Pools, AllowDevices: s.Flags.AllowDevices, Verbosity: s.Flags.Verbosity}
	if s.File != "" {
		config, err := c.parse(s)
		if err != nil {
			return Settings{}, err
		}
		labels, err := c.nodeLabels(s, config)
		if err != nil {
			return Settings{}, err
		}
		said, err := config.choose(labels)
		if err != nil {
			return Settings{}, fmt.Errorf("--config %s: %w", s.File, err)
		}
		settings = said.or(settings)
	}
	if err := CheckPools(settings.Pools); err != nil {
		return Settings{}, err
	}
	if settings.Pools == nil && settings.AllowDevices == nil { // an empty list in the file is a decision
		return Settings{}, errNothing
	}
	return settings, nil
}

// or returns the file's settings, completed by the flags.
func (s Settings) or(flags Settings) Settings {
	if s.Pools == nil {
		s.Pools = flags.Pools
	}
	if s.AllowDevices == nil {
		s.AllowDevices = flags.AllowDevices
	}
	if s.Verbosity < 0 {
		s.Verbosity = flags.Verbosity
	}
	return s
}

func (c contents) parse(s Source) (*Config, error) {
	if c.configErr != nil {
		return nil, fmt.Errorf("--config: %w", c.configErr)
	}
	config, err := Parse([]byte(c.config))
	if err == nil {
		err = config.conflict(s.Flags)
	}
	if err == nil && len(config.Nodes) > 0 && s.LabelsFile == "" {
		err = errors.New("nodes are chosen by their labels: give --node-labels FILE with those of this node")
	}
	if err != nil {
		return nil, fmt.Errorf("--config %s: %w", s.File, err)
	}
	return config, nil
}

func (c contents) nodeLabels(s Source, config *Config) (map[string]string, error) {
	if len(config.Nodes) == 0 {
		return nil, nil
	}
	if c.labelsErr != nil {
		return nil, fmt.Errorf("--node-labels: %w", c.labelsErr)
	}
	labels, err := nodelabels.Parse([]byte(c.labels))
	if err != nil {
		return nil, fmt.Errorf("--node-labels %s: %w", s.LabelsFile, err)
	}
	return labels, nil
}

// conflict refuses settings in both flags and file: neither wins. It also checks the entries of
// other nodes, so that all nodes of a cluster give the same answer.
func (c *Config) conflict(flags Flags) error {
	pools, devices := c.Pools != nil, c.AllowDevices != nil
	for _, n := range c.Nodes {
		pools, devices = pools || n.Pools != nil, devices || n.AllowDevices != nil
	}
	for _, both := range []struct {
		is        bool
		flag, key string
	}{
		{pools && len(flags.Pools) > 0, "--pool", "pools"},
		{devices && len(flags.AllowDevices) > 0, "--allow-device", "allowDevices"},
		{c.Logging != nil && c.Logging.Verbosity != nil && flags.VerbosityGiven, "-v", "logging.verbosity"},
	} {
		if both.is {
			return fmt.Errorf("it says %s, and the command line %s: leave one of them out", both.key, both.flag)
		}
	}
	return nil
}

// Describe returns this node's settings as flags, or the reason why it would not start. Without
// labels it only checks the file.
func (s Source) Describe() (string, error) {
	if s.File != "" && s.LabelsFile == "" {
		c := s.read()
		config, err := c.parse(Source{File: s.File, LabelsFile: "not needed", Flags: s.Flags})
		if err != nil {
			return "", err
		}
		if len(config.Nodes) > 0 {
			return fmt.Sprintf("%s can be used. It has entries for nodes: give --node-labels FILE to see which one a node has.\n",
				s.File), nil
		}
	}
	settings, err := s.Load()
	if err != nil {
		return "", err
	}
	var b strings.Builder
	if settings.Entry != "" {
		fmt.Fprintf(&b, "# entry %q of nodes\n", settings.Entry)
	}
	for _, p := range settings.Pools {
		fmt.Fprintf(&b, "--pool=%s\n", p)
	}
	for _, d := range settings.AllowDevices {
		fmt.Fprintf(&b, "--allow-device=%s\n", d)
	}
	fmt.Fprintf(&b, "-v=%d\n", settings.Verbosity)
	return b.String(), nil
}
