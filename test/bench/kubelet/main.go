// Command kubelet gives a directory to a group with the kubelet's own code and prints how many
// nanoseconds that took. It is a module of its own, so that the driver does not get the kubelet's
// dependencies.
package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/volume"
)

// published is a volume's mount. The walk uses only its path.
type published string

func (p published) GetPath() string                          { return string(p) }
func (p published) GetMetrics() (*volume.Metrics, error)     { return nil, errors.New("no metrics") }
func (p published) SetUp(volume.MounterArgs) error           { return nil }
func (p published) SetUpAt(string, volume.MounterArgs) error { return nil }
func (p published) GetAttributes() volume.Attributes         { return volume.Attributes{} }

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: kubelet DIRECTORY GROUP")
		os.Exit(2)
	}
	gid, err := strconv.ParseInt(os.Args[2], 10, 64)
	if err == nil {
		always := v1.FSGroupChangeAlways
		begin := time.Now()
		err = volume.NewVolumeOwnership(published(os.Args[1]), os.Args[1], &gid, &always, nil).ChangePermissions()
		fmt.Println(time.Since(begin).Nanoseconds())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
