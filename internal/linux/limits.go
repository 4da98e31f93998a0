package linux

import (
	"errors"

	"golang.org/x/sys/unix"
)

// AllowDescriptors lets this process, and those that it starts from now on, have n files open, setrlimit(2). Without the right to raise the
// hard limit, they may have as many as that is.
func AllowDescriptors(n uint64) error {
	set := func(cur, most uint64) error {
		return call("setrlimit", func() error { return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: cur, Max: most}) })
	}
	err := set(n, n)
	if !errors.Is(err, EPERM) {
		return err
	}
	var now unix.Rlimit
	if err := call("getrlimit", func() error { return unix.Getrlimit(unix.RLIMIT_NOFILE, &now) }); err != nil {
		return err
	}
	return set(now.Max, now.Max)
}

// AllowProcesses lets this process's user, and those that it starts, have any number of processes, setrlimit(2).
func AllowProcesses() error {
	return call("setrlimit", func() error {
		return unix.Setrlimit(unix.RLIMIT_NPROC, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	})
}
