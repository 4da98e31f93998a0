package mounter

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// usersOf names at most five processes that have a file or directory open below path, for an
// error message. It is empty if none is visible: another pid or mount namespace may hide them.
func usersOf(path string) string {
	const most = 5
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return ""
	}
	var found []string
	for _, p := range procs {
		dir := "/proc/" + p.Name() + "/"
		if strings.Trim(p.Name(), "0123456789") != "" || !uses(dir, path) {
			continue
		}
		name, err := linux.ReadSmall(dir + "comm")
		if err != nil {
			continue
		}
		if len(found) == most {
			found = append(found, "and others")
			break
		}
		found = append(found, fmt.Sprintf("process %s (%s)", p.Name(), strings.TrimSpace(name)))
	}
	if len(found) == 0 {
		return ""
	}
	return ": " + strings.Join(found, ", ")
}

func uses(dir, path string) bool {
	links, _ := filepath.Glob(dir + "fd/*") // empty if the process has ended
	for _, link := range append(links, dir+"cwd", dir+"root") {
		if to, err := os.Readlink(link); err == nil && (to == path || strings.HasPrefix(to, path+"/")) {
			return true
		}
	}
	return false
}
