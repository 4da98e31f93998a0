package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/crust-csi/crust-csi/internal/daemon"
	"github.com/crust-csi/crust-csi/internal/nodeconfig"
	"github.com/crust-csi/crust-csi/internal/privilege"
	"github.com/crust-csi/crust-csi/pkg/driver"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

type options struct {
	daemon.Flags

	endpoint, nodeID, driverName, stateDir, kubeletDir string

	fsGroupPolicy string
	expansion     string
	idmapProbe    bool
	defers        bool
	hostNamespace string
	registration  string
	config        nodeconfig.Source
	checkConfig   bool
	capabilities  string
	endpointGroup int
}

var driverNamePattern = regexp.MustCompile(`^[a-zA-Z0-9]([-a-zA-Z0-9_.]*[a-zA-Z0-9])?$`)

func parseFlags(args []string) (*options, error) {
	o := &options{}
	f := o.flags()
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	o.config.Flags.Verbosity = o.Verbosity
	f.Visit(func(given *flag.Flag) {
		o.config.Flags.VerbosityGiven = o.config.Flags.VerbosityGiven || given.Name == "v"
	})
	return o, o.check(f.Args())
}

func (o *options) flags() *flag.FlagSet {
	f := flag.NewFlagSet("csi-node", flag.ContinueOnError)
	f.StringVar(&o.endpoint, "endpoint", "unix:///run/csi-node/csi.sock", "socket to serve CSI on")
	f.IntVar(&o.endpointGroup, "endpoint-group", -1,
		"number of a group that may connect to --endpoint besides root, for sidecars that are "+
			"not root (default: none)")
	f.StringVar(&o.capabilities, "capabilities", privilege.Storage.List(),
		"capabilities that are kept; all others are given back at the start, and programs that are started have none of them. all: keep every one")
	f.StringVar(&o.nodeID, "node-id", "", "id of this node (default: host name)")
	f.StringVar(&o.driverName, "driver-name", driver.DefaultName, "name of the CSI driver")
	f.StringVar(&o.config.File, "config", "", "configuration file: pools by labels of nodes, devices, verbosity; "+
		"read again when it changes, and upon SIGHUP (default: none)")
	f.StringVar(&o.config.LabelsFile, "node-labels", "",
		`file with the labels of this node, key="value" on each line, for a configuration file that asks for them`)
	f.BoolVar(&o.checkConfig, "check-config", false, "read the configuration file, print what this node would have, and exit")
	f.Func("pool", nodeconfig.PoolSyntax+": a pool of volumes that are files in DIR; "+
		"N is how many times its room may be promised (default 1), SIZE what is kept of it for the driver's records (default 64Mi, less in a "+
		"small pool); repeatable, the first is the default", func(s string) error {
		p, err := nodeconfig.ParsePool(s)
		o.config.Flags.Pools = append(o.config.Flags.Pools, p)
		return err
	})
	f.Func("allow-device", "path or glob of block devices that static volumes may name; repeatable", func(s string) error {
		o.config.Flags.AllowDevices = append(o.config.Flags.AllowDevices, s)
		return mounter.Pattern(s).Check()
	})
	f.StringVar(&o.stateDir, "state-dir", "/var/lib/csi-node", "directory of what the driver has to remember")
	f.StringVar(&o.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "directory below which every staging and target path lies")
	f.StringVar(&o.fsGroupPolicy, "fsgroup-policy", "Mount",
		"who gives a volume to the pod's fsGroup: Mount (the driver, when it mounts) or File (the kubelet, which walks)")
	f.StringVar(&o.expansion, "expansion", "controller", "who enlarges volumes: controller (the orchestrator calls ControllerExpandVolume "+
		"on the volume's own node) "+
		"or node (NodeExpandVolume enlarges the volume and its file system, so one external-resizer serves all nodes)")
	f.BoolVar(&o.idmapProbe, "idmap-probe", true, "at the start, try an id-mapped mount of a new file system of each type, and log the "+
		"answers (about 0.1 s)")
	f.BoolVar(&o.defers, "runtime-assisted-mounts", true,
		"leave volumes whose StorageClass allows it (allowRuntimeAssistedMount) to pods' runtimes that can mount them")
	f.StringVar(&o.hostNamespace, "host-mount-namespace", "",
		"mount namespace of the host, in which runtimes look for targets (default: /proc/1/ns/mnt if it can be entered, otherwise this process's own)")
	f.StringVar(&o.registration, "kubelet-registration-dir", "",
		"the kubelet's directory of plugins (/var/lib/kubelet/plugins_registry), in which the driver makes itself known; the kubelet must see "+
			"the path of --endpoint as it is written (default: a registrar beside the driver does it)")
	o.AddMetrics(f)
	o.AddTo(f, "0 errors, 2 one line a call, 4 quiet calls too, 5 whole requests (without secrets)")
	return f
}

func (o *options) check(rest []string) error {
	if o.Version {
		return nil
	}
	if err := o.Check(rest); err != nil {
		return err
	}
	if o.config.LabelsFile != "" && o.config.File == "" {
		return errors.New("--node-labels: without --config nothing asks for labels")
	}
	if o.fsGroupPolicy != "Mount" && o.fsGroupPolicy != "File" {
		return fmt.Errorf("--fsgroup-policy %q: Mount or File", o.fsGroupPolicy)
	}
	if o.expansion != "controller" && o.expansion != "node" {
		return fmt.Errorf("--expansion %q: controller or node", o.expansion)
	}
	if err := privilege.Check(o.capabilities); err != nil {
		return fmt.Errorf("--capabilities: %w", err)
	}
	if len(o.driverName) > 63 || !driverNamePattern.MatchString(o.driverName) {
		return fmt.Errorf("--driver-name %q: up to 63 letters, digits, dashes and dots", o.driverName)
	}
	for name, dir := range map[string]string{"--state-dir": o.stateDir, "--kubelet-dir": o.kubeletDir} {
		if !filepath.IsAbs(dir) {
			return fmt.Errorf("%s %q is no absolute path", name, dir)
		}
	}
	if o.nodeID == "" {
		host, err := os.Hostname()
		if err != nil {
			return err
		}
		o.nodeID = strings.ToLower(host)
	}
	return nil
}
