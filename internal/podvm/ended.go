package podvm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/crust-csi/crust-csi/internal/plain"
)

// theEnd begins the line of a monitor's log that says why its pod had to end.
const theEnd = "crust-oci: the pod ends:"

// mostEnded is how many logs of pods that had to end are kept.
const mostEnded = 20

// say appends a line to the pod's log, as its monitor does. What it says may come from the guest, and is for nobody else: containerd's shim
// takes an error with certain words for success. The log is in memory, and a guest could have a line written for each container that ends:
// a full log gets no more lines, but that of the end.
func (p *Pod) say(what ...any) {
	f, w, err := p.open(monitorLog, mostOfEnd)
	if err != nil {
		return // the pod's directory has gone, and the pod with it
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || st.Size() > mostOfLog && what[0] != theEnd {
		return
	}
	fmt.Fprintln(w, line(what...))
}

// keepLog keeps the logs of a pod that had to end: its directory goes with its sandbox, a moment later. What the guest wrote is made plain
// text.
func (p *Pod) keepLog() error {
	log, err := os.ReadFile(p.at(monitorLog))
	if errors.Is(err, os.ErrNotExist) || err == nil && !bytes.Contains(append([]byte("\n"), log...), []byte("\n"+theEnd)) {
		return nil
	}
	if err != nil {
		return err
	}
	console, _ := os.ReadFile(p.at(consoleLog)) // there is none if nothing was started
	dir := filepath.Join(filepath.Dir(p.dir), ".ended")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, p.ID+".log"), append(log, plain.Lines(string(console), mostOfLog)...), 0o600); err != nil {
		return err
	}
	return prune(dir, mostEnded)
}

// prune removes the oldest files of a directory.
func prune(dir string, most int) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var files []os.FileInfo
	for _, e := range entries {
		if i, err := e.Info(); err == nil { // another call may have removed it
			files = append(files, i)
		}
	}
	slices.SortFunc(files, func(a, b os.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	for _, f := range files[min(most, len(files)):] {
		if err := os.Remove(filepath.Join(dir, f.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
