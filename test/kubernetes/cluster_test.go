//go:build kubernetes

// Package kubernetes_test runs pods on a real Kubernetes: see cluster.sh.
package kubernetes_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

const (
	driver = "csi.crust.dev"
	system = "crust-csi" // the namespace of deploy/kubernetes
	// failures is where a failed test saves logs and objects.
	failures = "../../.cache/kubernetes/failures"
)

var (
	// nodes is the number of nodes: three, or that of a row of versions.
	nodes, _ = strconv.Atoi(cmp.Or(os.Getenv("CRUST_KUBERNETES_NODES"), "3"))
	// state is cluster.sh's directory of the first node.
	state = cmp.Or(os.Getenv("CRUST_KUBERNETES_STATE"), "../../.cache/kubernetes/node")
)

// try runs a command on the first node.
func try(ctx context.Context, stdin string, argv ...string) (string, error) {
	return on(ctx, "node", stdin, argv...)
}

// on runs a command on a node. It runs kubectl again, as long as ctx lasts, if the API server was too busy to answer.
func on(ctx context.Context, node, stdin string, argv ...string) (string, error) {
	for again := false; ; again = true {
		c := exec.CommandContext(ctx, "./cluster.sh", append([]string{"on", node}, patient(argv)...)...)
		c.Stdin = strings.NewReader(stdin)
		var out, words bytes.Buffer
		c.Stdout, c.Stderr = &out, &words
		c.WaitDelay = time.Second
		begin := time.Now()
		err := c.Run()
		if argv[0] == "kubectl" && argv[1] == "get" {
			thisMachine.took(time.Since(begin))
		}
		if err == nil || again && wasDone(argv, words.String()) {
			return strings.TrimSpace(out.String()), nil
		}
		if notAnswered(argv, words.String()) && ctx.Err() == nil {
			time.Sleep(300 * time.Millisecond)
			continue
		}
		return strings.TrimSpace(out.String()), fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(words.String()))
	}
}

// onNode runs a shell script on the node, in the host's namespaces.
func onNode(t testing.TB, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait(time.Minute))
	defer cancel()
	out, err := try(ctx, "", "bash", "-c", script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// onNodeIn does the same in a directory, for scripts that take longer.
func onNodeIn(dir, script string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait(6*time.Minute))
	defer cancel()
	return try(ctx, "", "bash", "-euc", "cd "+dir+"\n"+script)
}

// space is a test's own Kubernetes namespace.
type space struct {
	t  testing.TB
	ns string
}

var unfit = regexp.MustCompile(`[^a-z0-9]+`)

// use makes a namespace. When the test ends, it deletes everything in it and expects that no volume
// is left.
func use(t testing.TB) *space {
	t.Helper()
	s := &space{t: t, ns: strings.Trim(unfit.ReplaceAllString(strings.ToLower(strings.TrimPrefix(t.Name(), "Test")), "-"), "-")}
	if len(s.ns) > 50 {
		s.ns = strings.Trim(s.ns[:50], "-")
	}
	s.kubectl("create", "namespace", s.ns)
	t.Cleanup(func() {
		if t.Failed() {
			s.keep()
		}
		s.clear()
	})
	return s
}

// clear deletes the namespace's objects and waits until its volumes are gone. Removing the
// namespace itself takes longer.
func (s *space) clear() {
	s.t.Helper()
	s.kubectl("delete", "pods", "--all", "-n", s.ns, "--grace-period=1", "--timeout=90s")
	s.kubectl("delete", "pvc", "--all", "-n", s.ns, "--timeout=90s")
	s.kubectl("delete", "volumesnapshots", "--all", "-n", s.ns, "--timeout=90s")
	s.kubectl("delete", "namespace", s.ns, "--wait=false", "--ignore-not-found")
	// external-provisioner retries after up to five minutes.
	s.until(2*time.Minute, "no persistent volume of the test is left", func() (string, bool) {
		left := s.volumes()
		return left, left == ""
	})
}

// volumes lists the persistent volumes of the namespace's claims.
func (s *space) volumes() string {
	s.t.Helper()
	return s.kubectl("get", "pv", "-o", `jsonpath={range .items[?(@.spec.claimRef.namespace=="`+s.ns+
		`")]}{.metadata.name} {.status.phase} {.status.message}{"\n"}{end}`)
}

// keep saves objects and logs of a failed test.
func (s *space) keep() {
	dir := filepath.Join(failures, s.ns)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		s.t.Log(err)
		return
	}
	for name, argv := range map[string][]string{
		"events": {"get", "events", "-n", s.ns, "--sort-by=.lastTimestamp"},
		"pods":   {"describe", "pods,pvc,volumesnapshots", "-n", s.ns},
		"pv":     {"describe", "pv"},
		"system": {"get", "pods", "-n", system, "-o", "yaml"},
		"driver": {"logs", "-n", system, "-l", "app.kubernetes.io/part-of=crust-csi", "--all-containers", "--prefix", "--tail=2000"},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), wait(20*time.Second))
		out, err := try(ctx, "", append([]string{"kubectl"}, argv...)...)
		cancel()
		if err != nil {
			out += "\n" + err.Error()
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(out+"\n"), 0o644); err != nil {
			s.t.Log(err)
		}
		if name == "events" {
			lines := strings.Split(out, "\n")
			s.t.Logf("events:\n%s", strings.Join(lines[max(0, len(lines)-25):], "\n"))
		}
	}
	s.t.Logf("more is in .cache/kubernetes/failures/%s, and the node's logs in %s/log", s.ns, state)
}

func (s *space) try(argv ...string) (string, error) {
	for begin := time.Now(); ; {
		ctx, cancel := context.WithTimeout(context.Background(), wait(4*time.Minute))
		out, err := try(ctx, "", append([]string{"kubectl"}, argv...)...)
		cancel()
		if !unfinished(begin, argv, err) {
			return out, err
		}
	}
}

func (s *space) kubectl(argv ...string) string {
	s.t.Helper()
	out, err := s.try(argv...)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// apply creates objects in the test's namespace.
func (s *space) apply(yaml string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait(time.Minute))
	defer cancel()
	if _, err := try(ctx, yaml, "kubectl", "apply", "-n", s.ns, "-f", "-"); err != nil {
		s.t.Fatalf("%v\n%s", err, yaml)
	}
}

// claim creates a PersistentVolumeClaim; more is further fields of its spec, as flow-style YAML.
func (s *space) claim(name, class, size, mode string, more ...string) {
	s.t.Helper()
	s.apply(fmt.Sprintf(`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: %s},
spec: {storageClassName: %s, accessModes: [%s], resources: {requests: {storage: %s}}%s}}`, name, class, mode, size, fields(more)))
}

func fields(more []string) string {
	if len(more) == 0 {
		return ""
	}
	return ", " + strings.Join(more, ", ")
}

// podText returns a pod with one container that sleeps, and its volumes at the given places:
// "claim:/path", with ":ro" appended for a read-only mount, and claim:/dev/x for a raw block
// volume.
func podText(name string, volumes []string, more ...string) string {
	var mounts, devices, sources []string
	for i, v := range volumes {
		parts := strings.Split(v, ":")
		ro := ""
		if len(parts) > 2 {
			ro = ", readOnly: true"
		}
		if strings.HasPrefix(parts[1], "/dev/") {
			devices = append(devices, fmt.Sprintf("{name: v%d, devicePath: %s}", i, parts[1]))
		} else {
			mounts = append(mounts, fmt.Sprintf("{name: v%d, mountPath: %s%s}", i, parts[1], ro))
		}
		sources = append(sources, fmt.Sprintf("{name: v%d, persistentVolumeClaim: {claimName: %s}}", i, parts[0]))
	}
	return fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: %s}, spec: {terminationGracePeriodSeconds: 1,
containers: [{name: c, image: "localhost/test/busybox:1", volumeMounts: [%s], volumeDevices: [%s]}],
volumes: [%s]%s}}`, name, strings.Join(mounts, ", "), strings.Join(devices, ", "), strings.Join(sources, ", "), fields(more))
}

// pod creates a pod and waits until it runs.
func (s *space) pod(name string, volumes []string, more ...string) {
	s.t.Helper()
	s.apply(podText(name, volumes, more...))
	s.ready(name)
}

func (s *space) ready(pods ...string) {
	s.t.Helper()
	for _, p := range pods {
		s.kubectl("wait", "-n", s.ns, "--for=condition=Ready", "pod/"+p, "--timeout=90s")
	}
}

// delete removes pods and waits until they end.
func (s *space) delete(pods ...string) {
	s.t.Helper()
	for _, p := range pods {
		s.kubectl("delete", "pod", p, "-n", s.ns, "--grace-period=1", "--timeout=90s")
	}
}

// run runs a shell script in a pod's container.
func (s *space) run(pod, script string) string {
	s.t.Helper()
	out, err := s.tryRun(pod, script)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

func (s *space) tryRun(pod, script string) (string, error) {
	return s.try("exec", "-n", s.ns, pod, "--", "sh", "-c", script)
}

// get reads one field of an object.
func (s *space) get(object, path string) string {
	s.t.Helper()
	return s.kubectl("get", object, "-n", s.ns, "-o", "jsonpath={"+path+"}")
}

// target returns where a claim is mounted on the node for a pod.
func (s *space) target(pod, claim string) string {
	s.t.Helper()
	return fmt.Sprintf("/var/lib/kubelet/pods/%s/volumes/kubernetes.io~csi/%s/mount", s.get("pod/"+pod, ".metadata.uid"),
		s.get("pvc/"+claim, ".spec.volumeName"))
}

// until waits for a condition, longer if the machine becomes slow meanwhile. A failure's message shows the last state.
func (s *space) until(most time.Duration, what string, look func() (seen string, ok bool)) {
	s.t.Helper()
	longest := wait(most)
	for begin := time.Now(); ; {
		looked := time.Now()
		seen, ok := look()
		if ok {
			return
		}
		if longest = max(longest, wait(most)); time.Since(begin) > longest {
			s.t.Fatalf("not within %s: %s; seen: %s", longest, what, seen)
		}
		// A look is a program, and there are other tests: seldom after long.
		time.Sleep(max(300*time.Millisecond, time.Since(looked), min(time.Since(begin)/10, 2*time.Second)))
	}
}

// said waits for an event on an object whose reason and message match.
func (s *space) said(object, pattern string) string {
	s.t.Helper()
	return s.saidWithin(60*time.Second, object, pattern)
}

func (s *space) saidWithin(most time.Duration, object, pattern string) string {
	s.t.Helper()
	kind, name, _ := strings.Cut(object, "/")
	re := regexp.MustCompile(pattern)
	var found string
	s.until(most, fmt.Sprintf("an event on %s that matches %q", object, pattern), func() (string, bool) {
		var list struct {
			Items []struct {
				Reason, Message string
				InvolvedObject  struct{ Kind, Name string }
			}
		}
		if err := json.Unmarshal([]byte(s.kubectl("get", "events", "-n", s.ns, "-o", "json")), &list); err != nil {
			s.t.Fatal(err)
		}
		var all []string
		for _, e := range list.Items {
			if strings.EqualFold(e.InvolvedObject.Kind, kind) && e.InvolvedObject.Name == name {
				all = append(all, e.Reason+": "+e.Message)
				if re.MatchString(e.Reason + ": " + e.Message) {
					found = e.Reason + ": " + e.Message
					return "", true
				}
			}
		}
		return strings.Join(all, "\n"), false
	})
	return found
}

// mountOf returns the node's mountinfo line of a path, or "".
func mountOf(t testing.TB, path string) string {
	t.Helper()
	return onNode(t, `awk -v p='`+path+`' '$5 == p' /proc/1/mountinfo`)
}
