//go:build kubernetes && fleet

package kubernetes_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// request is one of the driver's requests in the API server's audit log.
type request struct {
	who   string // the account
	node  string // the node of its token
	what  string // verb and resource
	watch bool
	open  bool // it has not ended: a watch that goes on
}

// requests ended since then, or are open: watches end after minutes.
func requests(t *testing.T, since time.Time) []request {
	t.Helper()
	var all []request
	seen := map[string]int{} // a watch has two stages
	for line := range strings.Lines(onNode(t, "cat /etc/kubernetes/audit.log")) {
		var e struct {
			AuditID, Verb, Stage string
			User                 struct {
				Username string
				Extra    map[string][]string
			}
			ObjectRef                struct{ Resource, Subresource string }
			RequestReceivedTimestamp time.Time
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if e.RequestReceivedTimestamp.Before(since) {
			continue
		}
		open := e.Stage == "ResponseStarted"
		if i, again := seen[e.AuditID]; again {
			all[i].open = all[i].open && open
			continue
		}
		seen[e.AuditID] = len(all)
		r := request{who: strings.TrimPrefix(e.User.Username, "system:serviceaccount:"+system+":"),
			what: e.Verb + " " + e.ObjectRef.Resource, watch: e.Verb == "watch", open: open}
		if e.ObjectRef.Subresource != "" {
			r.what += "/" + e.ObjectRef.Subresource
		}
		if n := e.User.Extra["authentication.kubernetes.io/node-name"]; len(n) > 0 {
			r.node = n[0]
		}
		all = append(all, r)
	}
	return all
}

// 11.2: what the driver costs the API server: idle, for a claim and its pod, and in objects. It is
// measured on three nodes. Costs per node are multiplied. Work on a node for another node's claim
// is an error: it would grow with the square of the nodes.
func TestFleet_WhatTheAPIServerPays(t *testing.T) {
	const fleet, idle, claims = 5000, 2 * time.Minute, 10
	s := use(t)
	settled(s)
	type row struct{ who, what string }
	table := map[row]float64{}
	print := func(title string, per float64) {
		lines := []string{"", title, ""}
		for _, r := range slices.SortedFunc(maps.Keys(table), func(a, b row) int { return strings.Compare(a.who+a.what, b.who+b.what) }) {
			lines = append(lines, fmt.Sprintf("| %s | %s | %.2f |", r.who, r.what, table[r]/per))
		}
		t.Log(strings.Join(lines, "\n"))
		clear(table)
	}

	// The watches after a fresh start are those of any time.
	for _, d := range []string{"daemonset/csi-sidecars", "deployment/csi-resizer", "deployment/csi-steward", "daemonset/crust-agent"} {
		s.kubectl("rollout", "restart", "-n", system, d)
	}
	begin := time.Now()
	settled(s)
	time.Sleep(20 * time.Second)
	watches, most := map[string]int{}, watchesOfThePage(t)
	for _, r := range requests(t, begin) {
		if r.node == "node-3" && (r.who == "csi-sidecars" || r.who == "crust-agent") {
			table[row{r.who, r.what}]++
			if r.watch && r.open {
				watches[r.who]++
			}
		}
	}
	print("The start of one node:", 1)
	for who, n := range watches {
		if n > most[who] {
			t.Errorf("%s of one node has %d watches, %d of %d nodes; docs/performance.md has %d", who, n, n*fleet, fleet, most[who])
		}
	}
	if len(watches) != len(most) {
		t.Errorf("accounts with watches: %v; docs/performance.md has %v", watches, most)
	}

	begin = time.Now()
	time.Sleep(idle)
	var perNode float64
	for _, r := range requests(t, begin) {
		table[row{r.who, r.what}]++
		if !r.watch && (r.who == "csi-sidecars" || r.who == "crust-agent") {
			perNode++
		}
	}
	perNode /= 3 * idle.Minutes()
	print("Requests in a minute without claims, of three nodes together:", idle.Minutes())
	if perNode > 1 {
		t.Errorf("an idle node asks %.1f times a minute: %.0f a second of %d nodes", perNode, perNode*fleet/60, fleet)
	}

	begin = time.Now()
	for i := range claims {
		s.claim(fmt.Sprintf("c-%d", i), "crust-ext4", "64Mi", "ReadWriteOnce")
		s.apply(podText(fmt.Sprintf("p-%d", i), []string{fmt.Sprintf("c-%d:/data", i)}, away("node-3")))
	}
	for i := range claims {
		s.ready(fmt.Sprintf("p-%d", i))
	}
	s.kubectl("delete", "pods", "--all", "-n", s.ns, "--grace-period=1", "--timeout=90s")
	s.kubectl("delete", "pvc", "--all", "-n", s.ns, "--timeout=90s")
	time.Sleep(5 * time.Second)
	others := 0
	for _, r := range requests(t, begin) {
		switch {
		case r.watch:
		case r.node != "node-3" && (r.who == "csi-sidecars" || r.who == "crust-agent"):
			others++
			table[row{r.who + " of other nodes", r.what}]++
		default:
			table[row{r.who, r.what}]++
		}
	}
	print("Requests for a claim and its pod, from its making to its end:", claims)
	if others > claims/2 {
		t.Errorf("other nodes asked %d times because of %d claims", others, claims)
	}

	classes := len(strings.Fields(s.kubectl("get", "storageclasses",
		"-o", `jsonpath={.items[?(@.provisioner=="`+driver+`")].metadata.name}`)))
	capacities := len(strings.Fields(s.kubectl("get", "csistoragecapacities", "-n", system, "-o", "name")))
	t.Logf("%d classes: %d CSIStorageCapacities on three nodes; %d nodes have %d, %d watches, %.0f requests a second",
		classes, capacities, fleet, capacities/3*fleet, (watches["csi-sidecars"]+watches["crust-agent"])*fleet, perNode*fleet/60)
	if capacities != 3*classes {
		t.Errorf("%d capacities of %d classes on three nodes", capacities, classes)
	}
}
