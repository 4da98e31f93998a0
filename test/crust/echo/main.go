// Command echo answers datagrams with the same, and "!", at the addresses that its arguments name after the first. Once the first of these
// sockets has answered, it also sends by itself, to the address that the first argument names. A container runs it.
package main

import (
	"fmt"
	"net"
	"os"
	"time"
)

func main() {
	peer, err := net.ResolveUDPAddr("udp", os.Args[1])
	must(err)
	for i, address := range os.Args[2:] {
		c, err := net.ListenPacket("udp", address)
		must(err)
		go answer(c, func() {
			if i == 0 {
				go send(c, peer)
			}
		})
	}
	select {}
}

func must(err error) {
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
}

func answer(c net.PacketConn, first func()) {
	b := make([]byte, 64<<10)
	for answered := false; ; answered = true {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			continue
		}
		_, _ = c.WriteTo(append(b[:n:n], '!'), from) // the client sees it
		if !answered {
			first()
		}
	}
}

func send(c net.PacketConn, to net.Addr) {
	for {
		_, _ = c.WriteTo([]byte("of the server's own"), to) // the peer sees it
		time.Sleep(200 * time.Millisecond)
	}
}
