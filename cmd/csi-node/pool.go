package main

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/volume"
)

const poolSyntax = "NAME=loop:DIR[,overcommit=N][,reserve=SIZE]"

type poolSpec struct {
	name, dir  string
	overcommit float64 // 0: the default
	reserve    int64   // bytes; 0: the default
}

// parsePool reads NAME=loop:DIR[,overcommit=N][,reserve=SIZE].
func parsePool(s string) (poolSpec, error) {
	name, rest, ok := strings.Cut(s, "=")
	kind, rest, ok2 := strings.Cut(rest, ":")
	parts := strings.Split(rest, ",")
	spec := poolSpec{name: name, dir: filepath.Clean(parts[0])}
	if !ok || !ok2 || kind != "loop" || !filepath.IsAbs(parts[0]) {
		return poolSpec{}, fmt.Errorf("pool %q: give %s with an absolute directory", s, poolSyntax)
	}
	if err := volume.CheckPoolName(name); err != nil {
		return poolSpec{}, err
	}
	seen := map[string]bool{}
	for _, part := range parts[1:] {
		key, value, _ := strings.Cut(part, "=")
		var err error
		switch key {
		case "overcommit":
			spec.overcommit, err = parseOvercommit(value)
		case "reserve":
			spec.reserve, err = parseSize(value)
		default:
			return poolSpec{}, fmt.Errorf("pool %q: %q is no option of a pool; there are overcommit=N and reserve=SIZE "+
				"(a directory whose name has a comma cannot be a pool's)", s, part)
		}
		if err == nil && seen[key] {
			err = fmt.Errorf("it is given twice")
		}
		if err != nil {
			return poolSpec{}, fmt.Errorf("pool %q: %s: %w", s, part, err)
		}
		seen[key] = true
	}
	return spec, nil
}

func parseOvercommit(s string) (float64, error) {
	const most = 10000
	n, err := strconv.ParseFloat(s, 64)
	if err != nil || !(n >= 1 && n <= most) {
		return 0, fmt.Errorf("the value must be a number from 1 to %d", most)
	}
	return n, nil
}

// parseSize reads bytes, or a number of Ki, Mi or Gi.
func parseSize(s string) (int64, error) {
	const least = 1 << 20
	number, shift := s, 0
	for unit, bits := range map[string]int{"Ki": 10, "Mi": 20, "Gi": 30} {
		if n, ok := strings.CutSuffix(s, unit); ok {
			number, shift = n, bits
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n <= 0 || n > 1<<50>>shift || n<<shift < least {
		return 0, fmt.Errorf("the value must be a size of at least 1Mi, such as 64Mi or 1Gi")
	}
	return n << shift, nil
}
