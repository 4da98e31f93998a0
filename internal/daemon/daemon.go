// Package daemon is what the daemons share: their flags for logs and health, how they report an error, and how they serve and stop.
package daemon

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"google.golang.org/grpc/grpclog"
)

// Main runs a program. If it fails, Main writes the error and ends the process with status 1. A request for help is no failure.
func Main(name string, run func(args []string) error) {
	quiet()
	if err := run(os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(1)
	}
}

// quiet turns off gRPC's own log, unless its variables ask for it. Whom a daemon is connected to, such as a hostile guest, can make gRPC
// write a line for each frame. Errors of calls are in the daemon's log anyway.
func quiet() {
	if os.Getenv("GRPC_GO_LOG_SEVERITY_LEVEL") == "" {
		grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard))
	}
}

// Flags are the flags that daemons share.
type Flags struct {
	LogFormat      string
	Verbosity      int
	MetricsAddress string
	Version        bool // print it and exit
}

// AddTo adds all flags but --metrics-address. levels says what the levels of -v log.
func (o *Flags) AddTo(f *flag.FlagSet, levels string) {
	f.StringVar(&o.LogFormat, "log-format", "text", "text or json")
	f.IntVar(&o.Verbosity, "v", 2, "log verbosity: "+levels)
	f.BoolVar(&o.Version, "version", false, "print the version and exit")
}

// AddMetrics adds --metrics-address.
func (o *Flags) AddMetrics(f *flag.FlagSet) {
	f.StringVar(&o.MetricsAddress, "metrics-address", "",
		"HOST:PORT of /metrics, /healthz and /readyz; without HOST this machine only, * for every interface (default: off)")
}

// Check refuses values that no daemon takes, and arguments that no flag took.
func (o *Flags) Check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unexpected argument %q", rest[0])
	case o.LogFormat != "text" && o.LogFormat != "json":
		return fmt.Errorf("--log-format %q: text or json", o.LogFormat)
	}
	return nil
}
