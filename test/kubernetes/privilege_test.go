//go:build kubernetes

package kubernetes_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/privilege"
)

// token returns a sidecars' token, as their pod on that node has it.
func (s *space) token(node string) string {
	s.t.Helper()
	_, pod, _ := strings.Cut(s.daemon("csi-sidecars", node), "/")
	return s.kubectl("create", "token", "csi-sidecars", "-n", system, "--bound-object-kind=Pod", "--bound-object-name="+pod)
}

// does runs kubectl with a token as a dry run: the API server answers, and nothing changes.
func (s *space) does(token, stdin string, argv ...string) error {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait(time.Minute))
	defer cancel()
	_, err := try(ctx, stdin, append([]string{"kubectl", "--token", token, "--dry-run=server"}, argv...)...)
	if err != nil {
		return errors.New(strings.ReplaceAll(err.Error(), token, "TOKEN"))
	}
	return nil
}

// asks sends a dry-run request with a token. kubectl cannot send it, because it would read first, or change more.
func (s *space) asks(token, method, path, body string) error {
	s.t.Helper()
	c := &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(state, "api.sock"))
		},
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // a socket of this machine
	}}
	defer c.CloseIdleConnections()
	r, err := http.NewRequestWithContext(context.Background(), method, "https://node"+path+"?dryRun=All", strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", map[string]string{"PUT": "application/json", "PATCH": "application/merge-patch+json"}[method])
	answer, err := c.Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s: %s", method, path, answer.Status, b)
	}
	return nil
}

func (s *space) denied(err error, words ...string) {
	s.t.Helper()
	for _, w := range words {
		if err == nil || !strings.Contains(err.Error(), w) {
			s.t.Errorf("want a denial that says %q, got %v", w, err)
			return
		}
	}
}

// persistentVolume returns one as a provisioner makes it, with another source or affinity.
func persistentVolume(source, node string) string {
	const uid = "6d3ff0b1-0000-4000-8000-3f7c9a2d5b11"
	affinity := ""
	if node != "" {
		affinity = fmt.Sprintf(`, nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: topology.%s/node, operator: In, values: [%s]}]}]}}`, driver, node)
	}
	return fmt.Sprintf(`{apiVersion: v1, kind: PersistentVolume, metadata: {name: pvc-%s}, spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce],
persistentVolumeReclaimPolicy: Retain, storageClassName: crust-ext4, claimRef: {apiVersion: v1, kind: PersistentVolumeClaim, namespace: default, name: x, uid: %s}, %s%s}}`, uid, uid, source, affinity)
}

// A09: root on a node has the token of its sidecars. The token makes volumes of this driver on that node, and nothing that reaches
// further.
func TestA09_AStolenNodeTokenMakesNoOtherVolumes(t *testing.T) {
	t.Parallel()
	s := use(t)
	own, other := s.token("node"), s.token("node-2")
	csi := func(driver, more string) string {
		return fmt.Sprintf("csi: {driver: %s, volumeHandle: default.v1%s}", driver, more)
	}
	if err := s.does(own, persistentVolume(csi(driver, ""), "node"), "create", "-f", "-"); err != nil {
		t.Errorf("what the provisioner has to do is refused: %v", err)
	}
	const policy = "ValidatingAdmissionPolicy 'crust-csi-persistentvolumes'"
	for name, volume := range map[string]string{
		"a directory of the node":  persistentVolume("hostPath: {path: /}", "node"),
		"of another driver":        persistentVolume(csi("other.example", ""), "node"),
		"on another node":          persistentVolume(csi(driver, ""), "node-2"),
		"on any node":              persistentVolume(csi(driver, ""), ""),
		"local, on the node":       persistentVolume("local: {path: /etc}", "node"),
		"with an NFS server":       persistentVolume("nfs: {server: 192.0.2.1, path: /}", "node"),
		"that is not of one claim": strings.Replace(persistentVolume(csi(driver, ""), "node"), "name: pvc-", "name: mine-", 1),
		"whose kubelet wants a secret": persistentVolume(csi(driver, ", nodePublishSecretRef: {namespace: kube-system, name: any}"),
			"node"),
	} {
		t.Run(name, func(t *testing.T) {
			s := &space{t: t, ns: s.ns}
			s.denied(s.does(own, volume, "create", "-f", "-"), policy)
		})
	}
	s.denied(s.does(other, persistentVolume(csi(driver, ""), "node"), "create", "-f", "-"), policy,
		"not a volume of csi.crust.dev with the affinity of node node-2")
	unbound := s.kubectl("create", "token", "csi-sidecars", "-n", system)
	s.denied(s.does(unbound, persistentVolume(csi(driver, ""), "node"), "create", "-f", "-"), policy, "the token names no node")
}

// A09: a token of one node cannot change volumes, snapshots and capacities of another, and changes claims only as sidecars must.
func TestA09_AStolenNodeTokenTouchesNothingOfOtherNodes(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"})
	s.snapshot("snap", "data")
	own, other := s.token("node"), s.token("node-2")
	pv := s.get("pvc/data", ".spec.volumeName")
	content := s.get("volumesnapshot/snap", ".status.boundVolumeSnapshotContentName")
	capacity := s.kubectl("get", "csistoragecapacities", "-n", system, "-o",
		"jsonpath={.items[?(@.nodeTopology.matchLabels.topology\\.csi\\.crust\\.dev/node=='node')].metadata.name}")
	capacity, _, _ = strings.Cut(capacity, " ")
	finalizers := `{"metadata":{"finalizers":null}}`
	for name, c := range map[string]struct {
		policy string
		argv   []string
	}{
		"deletes a volume": {"persistentvolumes", []string{"delete", "pv", pv}},
		"frees a volume":   {"persistentvolumes", []string{"patch", "pv", pv, "-p", finalizers}},
		"changes a snapshot": {"snapshotcontents",
			[]string{"patch", "volumesnapshotcontent", content, "--type=merge", "-p", finalizers}},
		"deletes a capacity": {"capacities", []string{"delete", "csistoragecapacity", "-n", system, capacity}},
		"changes a node's capacity": {"capacities",
			[]string{"patch", "csistoragecapacity", "-n", system, capacity, "--type=merge", "-p", `{"capacity":"1Pi"}`}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &space{t: t, ns: s.ns}
			s.denied(s.does(other, "", c.argv...), "ValidatingAdmissionPolicy 'crust-csi-"+c.policy+"'", "node-2")
			if err := s.does(own, "", c.argv...); err != nil {
				t.Errorf("what the node's own sidecars do is refused: %v", err)
			}
		})
	}
	status := "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/" + content + "/status"
	s.denied(s.asks(other, "PATCH", status, `{"status":{"readyToUse":false}}`),
		"ValidatingAdmissionPolicy 'crust-csi-snapshotcontents'", "node-2")
	if err := s.asks(own, "PATCH", status, `{"status":{"readyToUse":false}}`); err != nil {
		t.Errorf("what the node's own snapshotter does is refused: %v", err)
	}
	s.denied(s.does(own, "", "patch", "pv", pv, "-p", `{"spec":{"claimRef":{"name":"stolen"}}}`),
		"its source, its claim and its reclaim policy stay")
	s.denied(s.does(own, "", "patch", "pv", pv, "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`),
		"its source, its claim and its reclaim policy stay")
	// Claims: the provisioner's finalizer, nothing that moves a claim elsewhere.
	claim := "/api/v1/namespaces/" + s.ns + "/persistentvolumeclaims/data"
	changed := func(kind, name string, change func(metadata, spec map[string]any)) string {
		t.Helper()
		var object map[string]any
		if err := json.Unmarshal([]byte(s.kubectl("get", kind, name, "-n", s.ns, "-o", "json")), &object); err != nil {
			t.Fatal(err)
		}
		change(object["metadata"].(map[string]any), object["spec"].(map[string]any))
		b, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	change := func(name string, change func(metadata, spec map[string]any)) string {
		return changed("pvc", name, change)
	}
	// An object whose owner is gone is deleted.
	orphan := func(m, _ map[string]any) {
		m["ownerReferences"] = []any{map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "name": "gone",
			"uid": "6d3ff0b1-0000-4000-8000-3f7c9a2d5b11"}}
	}
	s.denied(s.asks(own, "PUT", "/apis/snapshot.storage.k8s.io/v1/namespaces/"+s.ns+"/volumesnapshots/snap",
		changed("volumesnapshot", "snap", orphan)), "ValidatingAdmissionPolicy 'crust-csi-snapshots'", "only its finalizers")
	const policy = "ValidatingAdmissionPolicy 'crust-csi-claims'"
	s.denied(s.asks(own, "PUT", claim, change("data", orphan)), policy, "")
	if err := s.asks(own, "PUT", claim, change("data", func(m, _ map[string]any) {
		m["finalizers"] = append(m["finalizers"].([]any), "provisioner.storage.kubernetes.io/cloning-protection")
	})); err != nil {
		t.Errorf("the finalizer of a clone's source: %v", err)
	}
	s.denied(s.asks(own, "PUT", claim, change("data", func(m, _ map[string]any) { m["finalizers"] = []any{} })), policy, "finalizers")
	s.denied(s.asks(own, "PUT", claim, change("data", func(m, _ map[string]any) { m["labels"] = map[string]any{"a": "b"} })), policy,
		"labels")
	s.denied(s.asks(own, "PUT", claim, change("data", func(m, _ map[string]any) { m["annotations"].(map[string]any)["a"] = "b" })),
		policy, "annotations")
	s.denied(s.asks(own, "PUT", claim, change("data", func(_, spec map[string]any) {
		spec["resources"] = map[string]any{"requests": map[string]any{"storage": "1Gi"}}
	})), policy, "its spec")
	// A claim of any class that waits for its first pod names no driver yet.
	s.apply(`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: nobodys},
spec: {storageClassName: of-another-driver, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}`)
	drawn := change("nobodys", func(m, _ map[string]any) {
		m["annotations"].(map[string]any)["volume.kubernetes.io/selected-node"] = "node"
	})
	s.denied(s.asks(own, "PUT", "/api/v1/namespaces/"+s.ns+"/persistentvolumeclaims/nobodys", drawn), policy, "it is not drawn to a node")
	s.denied(s.asks(own, "PATCH", claim+"/status", `{"status":{"capacity":{"storage":"64Mi"}}}`), "403 Forbidden")
	// What the token may not do at all.
	for _, argv := range [][]string{{"get", "secrets", "-A"}, {"get", "pods", "-A"}, {"get", "events", "-A"}} {
		if _, err := s.try(append([]string{"--token", own}, argv...)...); err == nil || !strings.Contains(err.Error(), "forbidden") {
			t.Errorf("%v: %v", argv, err)
		}
	}
	s.kubectl("delete", "volumesnapshot", "snap", "-n", s.ns, "--timeout=60s")
}

// ofProcess runs a shell command about a process of that program on the node; $p is its directory in /proc. It waits for sidecars that
// restart because they lost the driver or the API server.
func ofProcess(t testing.TB, name, command string) string {
	t.Helper()
	return onNode(t, fmt.Sprintf("until p=/proc/$(pgrep -o -x %s) && %s; do sleep 0.1; done 2>/dev/null", name, command))
}

// statusOf returns a field of a process's status.
func statusOf(t testing.TB, name, field string) string {
	t.Helper()
	return ofProcess(t, name, fmt.Sprintf(`awk '$1 == "%s:" {$1 = ""; print}' $p/status`, field))
}

// A09: processes on the node hold exactly what they need. The test reads the processes, because container runtimes may deviate from a
// manifest.
func TestA09_ProcessesHoldWhatTheyNeed(t *testing.T) {
	t.Parallel()
	hex := func(s string) uint64 {
		t.Helper()
		n, err := strconv.ParseUint(strings.TrimSpace(s), 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	has := hex(onNode(t, `awk '$1 == "CapEff:" {print $2}' /proc/1/status`)) // this machine's root may lack one
	for name, needs := range map[string]privilege.Needs{"csi-node": privilege.Storage, "crustd": privilege.Sandboxes} {
		var wanted uint64
		for _, need := range needs {
			number, _ := linux.CapabilityNumber(need.Name)
			wanted |= 1 << number
		}
		wanted &= has
		for _, set := range []string{"CapEff", "CapBnd"} {
			if got := hex(statusOf(t, name, set)); got != wanted {
				t.Errorf("%s: %s is %#x, and it needs %#x", name, set, got, wanted)
			}
		}
	}
	host := onNode(t, "readlink /proc/1/ns/pid")
	for name, uid := range map[string]string{"csi-provisioner": "65532", "csi-snapshotter": "65532", "csi-resizer": "65532",
		"csi-steward": "65532", "crust-agent": "0"} {
		if got := hex(statusOf(t, name, "CapBnd")); got != 0 {
			t.Errorf("%s has capabilities %#x", name, got)
		}
		if got := strings.Fields(statusOf(t, name, "Uid")); len(got) != 4 || got[1] != uid {
			t.Errorf("%s runs as %v", name, got)
		}
		for field, want := range map[string]string{"Seccomp": "2", "NoNewPrivs": "1"} {
			if got := strings.TrimSpace(statusOf(t, name, field)); got != want {
				t.Errorf("%s: %s is %s", name, field, got)
			}
		}
		if got := ofProcess(t, name, "readlink $p/ns/pid"); got == host {
			t.Errorf("%s sees the processes of the node", name)
		}
	}
}

// A09: a missing capability of csi-node is named in the pod's event, in the driver's log, and by the doctor. Not beside other tests.
func TestA09_ACapabilityTakenAwayIsMissed(t *testing.T) {
	s := use(t)
	without := strings.Replace("--capabilities="+privilege.Storage.List(), "FOWNER,", "", 1)
	args := s.kubectl("get", "daemonset", "csi-node", "-n", system, "-o", "jsonpath={.spec.template.spec.containers[0].args}")
	changed := strings.Replace(args, "--capabilities="+privilege.Storage.List(), without, 1)
	if changed == args {
		t.Fatalf("no %s in %s", privilege.Storage.List(), args)
	}
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOncePod")
	s.pod("first", []string{"data:/data"}, group(3000))
	s.run("first", "echo x >/data/of-uid-1000")
	s.delete("first")
	s.kubectl("patch", "daemonset", "csi-node", "-n", system,
		"--type=json", "-p", `[{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": `+changed+`}]`)
	t.Cleanup(func() { s.kubectl("delete", "pods", "--all", "-n", s.ns, "--timeout=90s", "--grace-period=1") })
	t.Cleanup(func() {
		if err := install(); err != nil {
			t.Error(err)
		}
	})
	s.kubectl("rollout", "status", "-n", system, "daemonset/csi-node", "--timeout=90s")
	s.apply(podText("p", []string{"data:/data"}, group(4321)))
	s.said("Pod/p", "FailedMount: .*giving its files to group 4321: .*operation not permitted")
	const words = "the modes of files that belong to other users cannot be changed for a pod's fsGroup"
	if got := s.kubectl("logs", "-n", system, s.daemon("csi-node", "node")); !strings.Contains(got,
		`CAP_FOWNER is not held" without="`+words) {
		t.Errorf("the log does not say it:\n%s", got)
	}
	got, _ := s.try("exec", "-n", system, s.daemon("csi-node", "node"), "--", "crustctl", "--endpoint",
		"unix:///var/lib/kubelet/plugins/csi.crust.dev/csi.sock", "doctor")
	if !strings.Contains(got, "driver's CAP_FOWNER") || !strings.Contains(got, "without it, "+words) {
		t.Errorf("the doctor does not say it:\n%s", got)
	}
	if err := install(); err != nil {
		t.Fatal(err)
	}
	s.ready("p")
}
