// Package protocol is what the launcher and the guest say to each other: JSON
// values, one after the other, over a virtio-serial port that one process on
// each side owns for as long as the guest lives.
package protocol

// Port is the name of the virtio-serial port.
const Port = "crust.test"

// Request is from the launcher. One program runs at a time.
type Request struct {
	Argv []string `json:",omitempty"`
	Env  []string `json:",omitempty"`
	Dir  string   `json:",omitempty"`
	Kill bool     `json:",omitempty"` // the one that runs now
}

// Reply is from the guest: first Ready, then Out and Err while a program runs,
// and Exit when it ended.
type Reply struct {
	Ready string `json:",omitempty"` // the kernel's release
	Out   []byte `json:",omitempty"`
	Err   []byte `json:",omitempty"`
	Exit  *int   `json:",omitempty"`
}
