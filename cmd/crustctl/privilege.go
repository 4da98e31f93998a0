package main

import (
	"fmt"

	"github.com/crust-csi/crust-csi/internal/privilege"
)

// driverCapabilities reports which capabilities the driver lacks, and what fails without each. It
// examines the process that serves the socket: this process may have others.
func driverCapabilities(endpoint string) ([]finding, error) {
	d, err := lookAtDaemon(endpoint)
	if err != nil {
		return nil, err
	}
	missing, err := privilege.Storage.Missing(fmt.Sprintf("/proc/%d/status", d.pid))
	if err != nil {
		return nil, err
	}
	if len(missing) == 0 {
		return []finding{{What: "driver's capabilities", Answer: "yes: all that it needs"}}, nil
	}
	var list []finding
	for _, n := range missing {
		f := finding{What: "driver's CAP_" + n.Name, Answer: "no: it does not hold it", Do: "without it, " + n.Without, needed: n.Vital}
		list = append(list, f)
	}
	return list, nil
}
