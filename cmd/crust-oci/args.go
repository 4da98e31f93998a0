package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// withValue lists the global options of runc and crun that take the next word.
var withValue = []string{"--root", "--log", "--log-format", "--log-level", "--criu", "--rootless", "--cgroup-manager"}

// commands lists the commands of runc and crun.
var commands = []string{
	"checkpoint", "create", "delete", "events", "exec", "features", "help", "kill", "list", "mounts", "pause", "ps", "restore",
	"resume", "run", "spec", "start", "state", "update", "init", "version",
}

// parse finds the command and the bundle in a runtime's arguments. Options may have one dash or two, and their value after "=" or in the
// next word. An ambiguous command is an error: no created container may bypass this program.
func parse(args []string) (command, bundle string, err error) {
	bundle = "."
	for i := 0; i < len(args); i++ {
		a := args[i]
		name, value, has := strings.Cut(a, "=")
		if strings.HasPrefix(name, "-") {
			name = "--" + strings.TrimLeft(name, "-")
		}
		switch {
		case command == "" && slices.Contains(withValue, name):
			if !has {
				i++
			}
		case command == "" && !strings.HasPrefix(a, "-"):
			if command = a; !slices.Contains(commands, command) {
				return "", "", fmt.Errorf("%q is no command of runc or crun that is known here (of %q)", a, args)
			}
		case command != "" && (name == "--bundle" || name == "--b"):
			if !has {
				if i++; i >= len(args) {
					return "", "", fmt.Errorf("%s wants a directory (in %q)", a, args)
				}
				value = args[i]
			}
			// runc and crun treat an empty value as the working directory.
			bundle = cmp.Or(value, ".")
		}
	}
	return command, bundle, nil
}
