package fsprogs

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/confine"
)

// D01: what a tenant wrote may make a check say very much. Of that a bounded part is kept, and of an ordinary amount the end.
func TestD01_OutputTakesBoundedMemory(t *testing.T) {
	p := New(nil)
	for script, want := range map[string]struct {
		code int
		end  string
	}{
		"head -c 3000000 /dev/zero | tr '\\0' -; echo THE REASON; exit 4": {4, "THE REASON"},
		// The blocks of its standard output, in memory.
		"exec 3>&1; head -c 40000000 /dev/zero | tr '\\0' - 2>/dev/null; [ $(stat -L -c %b - <&3) -le 8192 ] && exit 5; exit 6": {5, "---"},
		"exit 7": {7, ""},
	} {
		out, code, err := p.start(t.Context(), exec.Command("sh", "-c", script), confine.Limits{})
		if err != nil || code != want.code || !strings.HasSuffix(out, want.end) || want.end == "" && out != "" {
			t.Errorf("%s: %d %v %q", script, code, err, out[max(0, len(out)-40):])
		}
	}
}
