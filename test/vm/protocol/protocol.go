// Package protocol is the protocol between launcher and guest: JSON values, one after another, over
// a virtio-serial port. One process on each side owns the port as long as the guest lives.
package protocol

// Port is the name of the virtio-serial port.
const Port = "crust.test"

// Request goes to the guest. One program runs at a time.
type Request struct {
	Argv []string `json:",omitempty"`
	Env  []string `json:",omitempty"`
	Dir  string   `json:",omitempty"`
	Kill bool     `json:",omitempty"` // the running one
}

// Reply comes from the guest: first Ready, then Out and Err while a program runs, and Exit when it
// ends.
type Reply struct {
	Ready string `json:",omitempty"` // the kernel's release
	Out   []byte `json:",omitempty"`
	Err   []byte `json:",omitempty"`
	Exit  *int   `json:",omitempty"`
}
