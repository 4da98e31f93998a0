package podvm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
)

func TestU04_WhoThePodsUsersAre(t *testing.T) {
	const ids = `[{"containerID": 0, "hostID": 70000, "size": 65536}]`
	with := func(uids, gids string) object {
		return config(t, `{"linux": {"namespaces": [{"type": "user"}], "uidMappings": `+uids+`, "gidMappings": `+gids+`}}`)
	}
	got, err := usersOf(with(ids, strings.Replace(ids, "70000", "80000", 1)))
	if err != nil || *got != (users{70000, 80000, 65536}) {
		t.Errorf("%+v %v", got, err)
	}
	if got, err := usersOf(config(t, container)); got != nil || err != nil {
		t.Errorf("without a namespace: %+v %v", got, err)
	}
	for says, uids := range map[string]string{
		"0 ranges": "[]", "2 ranges": `[1, 2]`, "0 ids from 0": "[{}]", "is no number": `[{"hostID": "7"}]`,
		"7 ids from 1":     `[{"containerID": 1, "hostID": 7, "size": 7}]`,
		"65536 ids from 0": `[{"containerID": 0, "hostID": 7, "size": 7}]`, // as many groups
		"out of range":     `[{"containerID": 0, "hostID": 4294967296, "size": 7}]`,
	} {
		if got, err := usersOf(with(uids, ids)); err == nil || !strings.Contains(err.Error(), says) ||
			!strings.Contains(err.Error(), "hostUsers: false") {
			t.Errorf("%s: %+v %v", says, got, err)
		}
	}
}

// The guest gets no user namespace and no mapping, and a stub is in none.
func TestU04_OnlyTheHostMapsIDs(t *testing.T) {
	const mapped = `"uidMappings": [{"size": 1}], "gidMappings": [{"size": 1}]`
	o := config(t, strings.NewReplacer(`{"type": "pid"}, `, `{"type": "pid"}, {"type": "user", "path": "/proc/1/ns/user"}, `,
		`"linux": {`, `"linux": {`+mapped+`, `, `"destination": "/data", `, `"destination": "/data", `+mapped+`, `).Replace(container))
	shared := access{}
	there, err := forGuest(o, "one", func(m object) (at string, err error) {
		shared, err = accessOf(m)
		return "/there", err
	})
	if err != nil {
		t.Fatal(err)
	}
	if shared.users == nil {
		t.Error("the host does not map what it shares")
	}
	here, err := (&Pod{dir: "/p"}).forStub(o, "one")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range [][]byte{there, here} {
		if strings.Contains(string(b), "Mappings") || strings.Contains(string(b), `"type":"user"`) {
			t.Errorf("%s", b)
		}
	}
}

// What a container is given shows the ids of its file system as the pod's.
func TestU04_WhatIsSharedBelongsToThePodsUsers(t *testing.T) {
	p := made(t, Pods{t.TempDir()}, "pod")
	source := t.TempDir()
	if err := os.Chown(source, 5, 0); err != nil {
		t.Fatal(err)
	}
	if err := p.add("one"); err != nil {
		t.Fatal(err)
	}
	if err := p.share("one", "1", source, access{users: &users{70000, 80000, 65536}}); err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(p.at("shared"), "one", "1")
	group, err := linux.GroupOf(at)
	if err != nil || group != 80000 {
		t.Errorf("the group is %d: %v", group, err)
	}
	if group, err := linux.GroupOf(source); err != nil || group != 0 {
		t.Errorf("the host's own group is %d: %v", group, err)
	}
	if err := p.share("one", "2", "/proc", access{users: &users{70000, 80000, 65536}}); err == nil ||
		!strings.Contains(err.Error(), "cannot map the ids") {
		t.Errorf("a file system without mappings: %v", err)
	}
	if err := p.drop("one"); err != nil {
		t.Error(err)
	}
}
