//go:build kubernetes

package kubernetes_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// What kubectl says when the API server did not answer it in time. All of these limits are fixed, so a busy machine reaches them.
var (
	handshake = regexp.MustCompile(`^Unable to connect to the server: net/http: TLS handshake timeout`)
	busy      = regexp.MustCompile(`net/http: TLS handshake timeout|http2: client connection lost|stream error: .*INTERNAL_ERROR|` +
		`Client\.Timeout exceeded|Error from server \(Timeout\): |etcdserver: request timed out|: unexpected EOF`)
)

// notAnswered tells whether a command was a request of kubectl's that the API server did not answer, and that can be sent again. What runs
// in a container is sent again only if it did not get there.
func notAnswered(argv []string, words string) bool {
	if argv[0] != "kubectl" {
		return false
	}
	if slices.Contains(argv, "exec") {
		return handshake.MatchString(strings.TrimSpace(words))
	}
	return busy.MatchString(words)
}

// wasDone tells whether a request that was sent again fails because the first one was carried out.
func wasDone(argv []string, words string) bool {
	return argv[0] == "kubectl" && (argv[1] == "create" && strings.Contains(words, "(AlreadyExists)") ||
		argv[1] == "delete" && strings.Contains(words, "(NotFound)"))
}

func TestFleet_ABusyAPIServerIsAskedAgain(t *testing.T) {
	t.Parallel()
	const lost = "Unable to connect to the server: http2: client connection lost"
	for _, c := range []struct {
		argv  string
		words string
		want  bool
	}{
		{"kubectl get pods", lost, true},
		{"kubectl get pods", "Unable to connect to the server: net/http: TLS handshake timeout\n", true},
		{"kubectl exec p -- true", "Unable to connect to the server: net/http: TLS handshake timeout\n", true},
		{"kubectl apply -f -", `error: error validating "STDIN": error validating data: failed to download openapi: Get "https://192.0.2.1:443/` +
			`openapi/v2?timeout=32s": net/http: request canceled (Client.Timeout exceeded while awaiting headers)`, true},
		{"kubectl apply -f -", `Get "https://192.0.2.1:443/x": stream error: stream ID 3; INTERNAL_ERROR; received from peer`, true},
		{"kubectl delete pods --all", "Error from server (Timeout): Timeout: request did not complete within requested timeout", true},
		{"kubectl exec p -- true", lost, false}, // it may have run
		{"bash -c true", lost, false},
		{"kubectl get pods", `Error from server (NotFound): pods "p" not found`, false},
		{"kubectl apply -f -", "Error from server (Forbidden): no", false},
		{"kubectl get pods", "The connection to the server 192.0.2.1:443 was refused", false}, // it does not run
		{"kubectl wait pod/p --timeout=90s", "error: timed out waiting for the condition on pods/p", false},
	} {
		if got := notAnswered(strings.Fields(c.argv), c.words); got != c.want {
			t.Errorf("%s: %s: %v", c.argv, c.words, got)
		}
	}
	for argv, want := range map[string]bool{"kubectl create namespace n": true, "kubectl delete pod p": false, "kubectl get pod p": false} {
		if got := wasDone(strings.Fields(argv), `Error from server (AlreadyExists): namespaces "n" already exists`); got != want {
			t.Errorf("%s: already exists: %v", argv, got)
		}
	}
	if !wasDone([]string{"kubectl", "delete", "pod", "p"}, `Error from server (NotFound): pods "p" not found`) {
		t.Error("what is deleted twice is deleted")
	}
}
