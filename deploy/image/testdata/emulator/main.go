// Command emulator does what QEMU's user emulation does before a program runs: it opens the file
// that it is given, and does not search PATH. It runs nothing.
package main

import (
	"fmt"
	"os"
)

func main() {
	st, err := os.Stat(os.Args[1])
	if err != nil || st.Mode()&0o111 == 0 {
		fmt.Fprintln(os.Stderr, "the emulator cannot run", os.Args[1], err)
		os.Exit(1)
	}
}
