// Command inside is what the tests run in a container, or as one.
//
//	inside FILE...            writes the first file and prints owner and group of all of them
//	inside as-pod NODE OP...  gives up every capability, opens the block device node and does
//	                          what the operations say; one line of answer each (see pod.go)
package main

import (
	"fmt"
	"os"
	"syscall"
)

func main() {
	if os.Args[1] == "as-pod" {
		asPod(os.Args[2], os.Args[3:])
		return
	}
	f, err := os.OpenFile(os.Args[1], os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o660)
	if err == nil {
		_, err = f.WriteString("from a container\n")
	}
	for _, name := range os.Args[1:] {
		var st syscall.Stat_t
		if err == nil {
			err = syscall.Stat(name, &st)
		}
		fmt.Printf("%s %d:%d\n", name, st.Uid, st.Gid)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}
