// Command filesystems prints parts of the table of file systems, for scripts:
//
//	filesystems names      those that can be made, one a line
//	filesystems packages   the programs of all rows and their Debian packages, "PROGRAM PACKAGE" in a line
//	filesystems tries FILE commands that make, check and grow each file system that can be made, in a file
//	                       named FILE and the file system's name. "grow FILE" enlarges the file.
package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

func main() {
	switch {
	case len(os.Args) == 2 && os.Args[1] == "names":
		for _, name := range fstype.Formats() {
			fmt.Println(name)
		}
	case len(os.Args) == 2 && os.Args[1] == "packages":
		for _, p := range fstype.Programs() {
			fmt.Println(p, fstype.PackageOf(p))
		}
	case len(os.Args) == 3 && os.Args[1] == "tries":
		for _, name := range fstype.Formats() {
			for _, argv := range tries(fstype.Of(name), os.Args[2]+name) {
				fmt.Println(strings.Join(argv, " "))
			}
		}
	default:
		fmt.Fprintln(os.Stderr, errors.New("usage: filesystems names, filesystems packages, or filesystems tries FILE"))
		os.Exit(2)
	}
}

func tries(t fstype.Type, file string) [][]string {
	list := [][]string{append(slices.Clone(t.Make), t.Force, file), append(slices.Clone(t.Check), file)}
	if len(t.NewID) > 0 {
		list = append(list, append(slices.Clone(t.NewID), file))
	}
	if len(t.Resize) > 0 {
		check := append(slices.Clone(t.Check), t.Fully...)
		list = append(list, []string{"grow", file}, append(check, file), append(slices.Clone(t.Resize), file))
	}
	return list
}
