package fault_test

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

func Example() {
	err := fault.New(fault.NotFound, "volume %s has no file: %w", "data", fs.ErrNotExist)
	err = fmt.Errorf("stage: %w", err)
	fmt.Println(err)
	fmt.Println(fault.KindOf(err), fault.Is(err, fault.NotFound), errors.Is(err, fs.ErrNotExist))
	// Output:
	// stage: volume data has no file: file does not exist
	// NotFound true true
}

// Only the log shows the Detail of a Private.
func ExampleDetails() {
	err := fault.New(fault.State, "volume data is in use%s",
		fault.Private{Public: " by another pod", Detail: ": mounted at /var/lib/kubelet/pods/1/v"})
	fmt.Println(err)
	fmt.Println(fault.Details(err))
	// Output:
	// volume data is in use by another pod
	// [: mounted at /var/lib/kubelet/pods/1/v]
}
