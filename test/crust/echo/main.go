// Command echo answers datagrams with the same, and "!", at the addresses that it is given. A container runs it.
package main

import (
	"fmt"
	"net"
	"os"
)

func main() {
	for _, address := range os.Args[1:] {
		c, err := net.ListenPacket("udp", address)
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		go answer(c)
	}
	select {}
}

func answer(c net.PacketConn) {
	b := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			continue
		}
		_, _ = c.WriteTo(append(b[:n:n], '!'), from) // the client sees it
	}
}
