package nodeconfig

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/volume"
)

// PoolSyntax is the syntax of ParsePool.
const PoolSyntax = "NAME=loop:DIR[,overcommit=N][,reserve=SIZE]"

// Pool is a pool of volumes that are files in a directory.
type Pool struct {
	Name, Dir  string
	Overcommit float64 // 0: the default
	Reserve    int64   // bytes; 0: the default
}

// ParsePool reads the value of --pool.
func ParsePool(s string) (Pool, error) {
	name, rest, ok := strings.Cut(s, "=")
	kind, rest, ok2 := strings.Cut(rest, ":")
	parts := strings.Split(rest, ",")
	spec := Pool{Name: name, Dir: filepath.Clean(parts[0])}
	if !ok || !ok2 || kind != "loop" || !filepath.IsAbs(parts[0]) {
		return Pool{}, fmt.Errorf("pool %q: give %s with an absolute directory", s, PoolSyntax)
	}
	if err := volume.CheckPoolName(name); err != nil {
		return Pool{}, err
	}
	seen := map[string]bool{}
	for _, part := range parts[1:] {
		key, value, _ := strings.Cut(part, "=")
		var err error
		switch key {
		case "overcommit":
			spec.Overcommit, err = parseOvercommit(value)
		case "reserve":
			spec.Reserve, err = parseSize(value)
		default:
			return Pool{}, fmt.Errorf("pool %q: %q is no option of a pool; there are overcommit=N and reserve=SIZE "+
				"(a directory whose name has a comma cannot be a pool's)", s, part)
		}
		if err == nil && seen[key] {
			err = fmt.Errorf("it is given twice")
		}
		if err != nil {
			return Pool{}, fmt.Errorf("pool %q: %s: %w", s, part, err)
		}
		seen[key] = true
	}
	return spec, nil
}

// String formats the pool for --pool.
func (p Pool) String() string {
	text := p.Name + "=loop:" + p.Dir
	if p.Overcommit != 0 {
		text += fmt.Sprintf(",overcommit=%g", p.Overcommit)
	}
	if p.Reserve != 0 {
		text += fmt.Sprintf(",reserve=%d", p.Reserve)
	}
	return text
}

func parseOvercommit(s string) (float64, error) {
	n, err := strconv.ParseFloat(s, 64)
	if err != nil {
		n = 0
	}
	return n, checkOvercommit(n)
}

func checkOvercommit(n float64) error {
	const most = 10000
	if !(n >= 1 && n <= most) {
		return fmt.Errorf("the value must be a number from 1 to %d", most)
	}
	return nil
}

// parseSize reads a number of bytes, or of Ki, Mi, Gi or Ti.
func parseSize(s string) (int64, error) {
	const least = 1 << 20
	number, shift := s, 0
	for unit, bits := range map[string]int{"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40} {
		if n, ok := strings.CutSuffix(s, unit); ok {
			number, shift = n, bits
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n <= 0 || n > 1<<50>>shift || n<<shift < least {
		return 0, fmt.Errorf("the value must be a size from 1Mi to 1024Ti, a whole number with Ki, Mi, Gi or Ti, such as 64Mi or 1Gi")
	}
	return n << shift, nil
}

// pool returns the pool of an entry in the file.
func (i PoolItem) pool() (Pool, error) {
	p := Pool{Name: i.Name, Dir: filepath.Clean(i.Path)}
	if err := volume.CheckPoolName(i.Name); err != nil {
		return Pool{}, err
	}
	if !filepath.IsAbs(i.Path) || strings.Contains(i.Path, "\x00") {
		return Pool{}, fmt.Errorf("path %q of pool %s is no absolute directory", i.Path, i.Name)
	}
	if i.Overcommit != nil {
		p.Overcommit = *i.Overcommit
		if err := checkOvercommit(p.Overcommit); err != nil {
			return Pool{}, fmt.Errorf("overcommit of pool %s: %w", i.Name, err)
		}
	}
	if i.Reserve != nil {
		var err error
		if p.Reserve, err = parseSize(*i.Reserve); err != nil {
			return Pool{}, fmt.Errorf("reserve of pool %s: %w", i.Name, err)
		}
	}
	return p, nil
}

// CheckPools checks the pools of one node together.
func CheckPools(pools []Pool) error {
	names, dirs := map[string]bool{}, map[string]string{}
	for _, p := range pools {
		if names[p.Name] {
			return fmt.Errorf("the pool %s is there twice", p.Name)
		}
		if other := dirs[p.Dir]; other != "" {
			return fmt.Errorf("the pools %s and %s have one directory, %s", other, p.Name, p.Dir)
		}
		for dir, other := range dirs {
			if within(p.Dir, dir) {
				return fmt.Errorf("the directory %s of pool %s is inside the directory %s of pool %s", p.Dir, p.Name, dir, other)
			}
			if within(dir, p.Dir) {
				return fmt.Errorf("the directory %s of pool %s is inside the directory %s of pool %s", dir, other, p.Dir, p.Name)
			}
		}
		names[p.Name], dirs[p.Dir] = true, p.Name
	}
	return nil
}

func within(dir, of string) bool { return strings.HasPrefix(dir, strings.TrimSuffix(of, "/")+"/") }
