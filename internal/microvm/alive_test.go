package microvm

import (
	"os/exec"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// A record outlives its QEMU, whose pid may be reused by now.
func TestC18_AnotherProcessOfThatNumberIsNotKilled(t *testing.T) {
	other := exec.Command("sleep", "3600")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	began, err := linux.ProcessStart(other.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	vm := VM{PID: other.Process.Pid, Began: began + "0"}
	if vm.Kill(); vm.Alive() {
		t.Error("another process is taken for it")
	}
	if now, err := linux.ProcessStart(other.Process.Pid); err != nil || now != began {
		t.Errorf("the other process has ended: %q, %v", now, err)
	}
	vm.Began = began
	if !vm.Alive() {
		t.Error("it is not known")
	}
	vm.Kill()
	if err := other.Wait(); err == nil || err.Error() != "signal: killed" {
		t.Errorf("it was not killed: %v", err)
	}
}
