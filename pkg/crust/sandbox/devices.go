package sandbox

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// Devices says which block devices sandboxes may get (C20).
type Devices struct {
	// Allow lists paths or patterns of devices. One that begins with the name of a CSI driver
	// ("csi.crust.dev=/dev/loop*") is for that driver's volumes only: another driver that defers
	// volumes cannot name its devices.
	Allow []string
	// ToAllow says how an administrator allows a device. Every refusal ends with it.
	ToAllow string
}

// SplitAllowed splits an entry of Devices.Allow into the driver, empty for any, and the path or
// pattern.
func SplitAllowed(entry string) (driver string, pattern mounter.Pattern, err error) {
	pattern = mounter.Pattern(entry)
	if name, rest, ok := strings.Cut(entry, "="); ok && !strings.HasPrefix(entry, "/") {
		driver, pattern = name, mounter.Pattern(rest)
		if driver == "" {
			return "", "", fmt.Errorf("%q names no driver before \"=\"", entry)
		}
	}
	if err := pattern.Check(); err != nil {
		return "", "", fmt.Errorf("%w, with or without DRIVER= before it", err)
	}
	return driver, pattern, nil
}

// driverOf returns the CSI driver of the volume at a target. The kubelet writes it to a file beside
// the target before it calls any driver.
func driverOf(kubeletDir, target string) (string, error) {
	below, err := filepath.Rel(kubeletDir, filepath.Join(filepath.Dir(target), "vol_data.json"))
	if err != nil {
		return "", err
	}
	root, err := os.OpenRoot(kubeletDir)
	if err != nil {
		return "", err
	}
	defer root.Close()
	f, err := root.Open(below) // not outside of the root, even through links
	if err != nil {
		return "", err
	}
	defer f.Close()
	const most = 1 << 16
	var data struct {
		DriverName string `json:"driverName"`
	}
	if err := json.NewDecoder(io.LimitReader(f, most)).Decode(&data); err != nil {
		return "", fmt.Errorf("%s: %w", f.Name(), err)
	}
	return data.DriverName, nil
}

// find opens a device that is allowed for the volume at a target below kubeletDir. An entry must name the path as it
// is written: another name of the same device is refused (mounter.FindExact).
func (d Devices) find(kubeletDir, path, target string) (mounter.Device, error) {
	refuse := func(why string) (mounter.Device, error) {
		return mounter.Device{}, fault.New(fault.Invalid, "device %q %s; allowed here are %s%s", path, why,
			cmp.Or(strings.Join(d.Allow, ", "), "none"), d.ToAllow)
	}
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || strings.ContainsAny(path, "\x00\n") {
		return refuse("is no clean absolute path")
	}
	literal, matched := false, false
	var others []string
	for _, entry := range d.Allow {
		driver, pattern, err := SplitAllowed(entry)
		if err != nil {
			return mounter.Device{}, err
		}
		ok, exactly := pattern.Matches(path)
		if !ok {
			continue
		}
		if driver != "" {
			if name, err := driverOf(kubeletDir, target); err != nil {
				others = append(others, fmt.Sprintf("%s, and which driver the volume at %s is of cannot be told: %v", driver, target, err))
				continue
			} else if name != driver {
				others = append(others, fmt.Sprintf("%s, and the volume at %s is of %q", driver, target, name))
				continue
			}
		}
		literal, matched = literal || exactly, true
	}
	if !matched && len(others) > 0 {
		return refuse("is for volumes of " + strings.Join(others, "; "))
	}
	if !matched {
		return refuse("is not allowed")
	}
	found, err := mounter.FindExact(path, literal)
	if fault.Is(err, fault.Invalid) {
		return refuse(err.Error())
	}
	return found, err
}
