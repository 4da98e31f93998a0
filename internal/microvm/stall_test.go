package microvm

import (
	"context"
	"encoding/hex"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/vport"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// C19: on a busy machine, one call of a hundred to some guests was answered only when the next one came.
func TestC19_NoCallWaitsForTheNext(t *testing.T) {
	for range 4 {
		busy := exec.Command("sh", "-c", "while :; do sh -c :; done")
		busy.SysProcAttr = linux.KilledWithThread()
		if err := busy.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = busy.Process.Kill(); _ = busy.Wait() }) // "signal: killed"
	}
	for _, guest := range []string{"one", "two", "three", "four"} {
		t.Run(guest, func(t *testing.T) { t.Parallel(); call(t, 400) })
	}
}

func call(t *testing.T, times int) {
	const guest = "../../.cache/guest/"
	if _, err := os.Stat(guest + "initramfs"); err != nil {
		t.Fatalf("%v; `make guest` builds it", err)
	}
	begin := time.Now()
	vm, err := Start(t.Context(), Config{Dir: t.TempDir(), Kernel: guest + "vmlinuz", Initrd: guest + "initramfs", DieWithParent: true})
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Kill()
	magic, err := hex.DecodeString(vm.Magic)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("passthrough:///guest", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return vport.Dial(t.Context(), vm.Channel, magic) }))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	patience := 10 * time.Minute
	for i := range times {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, err := guestv1.NewGuestClient(conn).Info(ctx, &guestv1.InfoRequest{})
		cancel()
		if err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
		if i == 0 { // a call is much less work than a boot
			patience = max(time.Since(begin), 10*time.Second)
		}
	}
}
