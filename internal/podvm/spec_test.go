package podvm

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/podguest"
)

// container is a container's config.json, as containerd makes it.
const container = `{
	"ociVersion": "1.2.0",
	"process": {"args": ["/bin/app"], "cwd": "/", "user": {"uid": 7, "gid": 8}, "terminal": true,
		"selinuxLabel": "a:b:c:s0", "apparmorProfile": "p",
		"capabilities": {"bounding": ["CAP_CHOWN"]}, "noNewPrivileges": false, "env": ["SECRET=1"]},
	"root": {"path": "rootfs", "readonly": true},
	"hostname": "pod",
	"mounts": [
		{"destination": "/proc", "type": "proc", "source": "proc"},
		{"destination": "/data", "type": "bind", "source": "/host/volume", "options": ["rbind", "ro"]}],
	"annotations": {"io.kubernetes.cri.sandbox-id": "pod"},
	"linux": {
		"cgroupsPath": "/kubepods/pod/one",
		"resources": {"memory": {"limit": 9007199254740993}, "cpu": {"shares": 3, "quota": 5, "cpus": "0-1"},
			"devices": [{"allow": false, "access": "rwm"}],
			"hugepageLimits": []},
		"seccomp": {"defaultAction": "SCMP_ACT_ERRNO"},
		"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc", "path": "/proc/1/ns/ipc"}, {"type": "uts", "path": "/proc/1/ns/uts"},
			{"type": "network", "path": "/proc/1/ns/net"}, {"type": "cgroup"}]}
}`

func config(t testing.TB, text string) object {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var o object
	if err := d.Decode(&o); err != nil {
		t.Fatal(err)
	}
	return o
}

func TestC24_WhatAGuestIsTold(t *testing.T) {
	b, err := forGuest(config(t, container), "one", func(m object) (string, error) { return "/in/guest" + text(m, "source"), nil })
	if err != nil {
		t.Fatal(err)
	}
	got := string(b)
	for _, want := range []string{
		`"args":["/bin/app"]`, `"uid":7`, `"SECRET=1"`, `"source":"/in/guest/host/volume"`, `"source":"proc"`,
		`"path":"` + podguest.Shared + `/one/rootfs","readonly":true`, `"limit":9007199254740993`, `"quota":5`, `"SCMP_ACT_ERRNO"`,
		`"namespaces":[{"type":"mount"},{"type":"pid"},{"type":"cgroup"}]`, `"cgroupsPath":"/crust/one"`,
		`"oomScoreAdj":0`, // not the agent's own
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is missing in %s", want, got)
		}
	}
	// What is the host's means nothing there.
	for _, not := range []string{"a:b:c:s0", "apparmor", "/proc/1/ns", "kubepods", "0-1", "hugepage", `"hostname"`} {
		if strings.Contains(got, not) {
			t.Errorf("%s is in %s", not, got)
		}
	}
}

// A stub has its container's terminal and cgroup, and none of its rights, files, secrets and limits.
func TestC24_AStubHasNoRights(t *testing.T) {
	p := &Pod{ID: "pod", dir: "/run/crust/pods/pod"}
	b, err := p.forStub(config(t, container), "one")
	if err != nil {
		t.Fatal(err)
	}
	got := string(b)
	for _, want := range []string{`"cgroupsPath":"/kubepods/pod/one"`, `"terminal":true`, `"noNewPrivileges":true`, `"CRUST_CONTAINER=one"`,
		`"path":"/run/crust/pods/pod/stub","readonly":true`, `{"type":"network"}`, `"shares":3`} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is missing in %s", want, got)
		}
	}
	for _, not := range []string{"CAP_", "SECRET", "/host/volume", "/bin/app", "rootfs", "/proc/1/ns/net", "9007199254740993", "quota",
		`"uid":7`} {
		if strings.Contains(got, not) {
			t.Errorf("%s is in %s", not, got)
		}
	}
}

func TestC24_WhatAMicroVMCannotDoIsRefused(t *testing.T) {
	if err := refused(config(t, container), false); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		from, to  string
		isSandbox bool
		says      string
	}{
		{`"type": "network"`, `"type": "time"`, true, "hostNetwork"},
		{`"type": "ipc"`, `"type": "time"`, true, "hostIPC"},
		{`"type": "pid"`, `"type": "time"`, true, "hostPID"},
		{`"hostname"`, `"hooks": {"prestart": [{"path": "/x"}]}, "hostname"`, false, "prestart hooks"},
		{`"hugepageLimits": []`, `"hugepageLimits": [{"pageSize": "1GB", "limit": 0}, {"pageSize": "2MB", "limit": 67108864}]`, false,
			"huge pages (2MB)"},
	} {
		changed := strings.Replace(container, c.from, c.to, 1)
		if changed == container {
			t.Fatalf("%s is not there", c.from)
		}
		if err := refused(config(t, changed), c.isSandbox); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.says, err)
		}
	}
}

// Whatever a config.json says: nothing of it reaches the stub but what a stub may have, and no source of a bind mount stays the host's.
func FuzzConfig(f *testing.F) {
	f.Add([]byte(container))
	f.Add([]byte(`{"mounts": [null, 1, {"source": "/a", "options": ["bind"]}], "linux": {"namespaces": {}, "resources": []}, "process": 3}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var o object
		if json.Unmarshal(b, &o) != nil {
			return
		}
		_ = refused(o, false)
		_ = refused(o, true)
		_, _ = blockDevices(o)
		_, _ = usersOf(o)
		const there = "/in/guest"
		out, err := forGuest(o, "one", func(object) (string, error) { return there, nil })
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range list(config(t, string(out)), "mounts") {
			if m, _ := m.(object); isBind(m) && text(m, "source") != there {
				t.Errorf("the guest binds %v", m)
			}
		}
		p := &Pod{ID: "pod", dir: "/p"}
		out, err = p.forStub(o, "one")
		if err != nil {
			t.Fatal(err)
		}
		stub := config(t, string(out))
		if sub(stub, "process")["capabilities"] != nil || len(list(stub, "mounts")) != 5 || text(sub(stub, "root"), "path") != "/p/stub" {
			t.Errorf("the stub is given %s", out)
		}
	})
}

func TestC24_ThePodsNetwork(t *testing.T) {
	v4 := "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n" +
		"eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n" +
		"eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
	const none = "00000000000000000000000000000000 00 "
	v6 := "fd000000000000000000000000000000 40 " + none + "00000000000000000000000000000000 00000100 00000001 00000000 00000001 eth0\n" +
		none + none + "fd000000000000000000000000000001 00000400 00000001 00000000 00000003 eth0\n" +
		none + none + "00000000000000000000000000000000 ffffffff 00000001 00000000 00200200 lo\n"
	device, gateways := routes(v4, v6)
	if device != "eth0" || len(gateways) != 2 || gateways[0].String() != "10.0.0.1" || gateways[1].String() != "fd00::1" {
		t.Errorf("%s %v", device, gateways)
	}
	if device, gateways := routes("", v6); device != "eth0" || len(gateways) != 1 {
		t.Errorf("IPv6 only: %s %v", device, gateways)
	}
	if device, _ := routes(strings.SplitAfterN(v4, "\n", 2)[0], ""); device != "" {
		t.Errorf("no route: %s", device)
	}
}

func FuzzRoutes(f *testing.F) {
	f.Add("eth0 00000000 0100000A 0003 0 0 0 00000000\n", "0 00 0 00 00 0 0 0 0003 eth0\n")
	f.Fuzz(func(t *testing.T, v4, v6 string) { routes(v4, v6) })
}

// A microVM is beside its pod's own container, so that the kubelet's limits of the pod hold for it.
func TestC24_TheCgroupOfAMicroVM(t *testing.T) {
	got := cgroups("5:memory:/kubepods/pod1/abc\n1:name=systemd:/kubepods/pod1/abc\n2:cpu,cpuacct:/\n", "abc")
	want := []string{"/sys/fs/cgroup/memory/kubepods/pod1/crust-vm-abc", "/sys/fs/cgroup/systemd/kubepods/pod1/crust-vm-abc"}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("%q", got)
	}
}

func TestC24_WhereAStubsMemoryIsLimited(t *testing.T) {
	want := memoryGroup{"/sys/fs/cgroup/memory/kubepods/pod1/abc", "memory.usage_in_bytes", "memory.limit_in_bytes",
		"memory.memsw.limit_in_bytes"}
	if g := memoryCgroup("5:memory:/kubepods/pod1/abc\n0::/kubepods/pod1/abc\n"); g != want {
		t.Error(g)
	}
	if g := memoryCgroup("nonsense\n::\n"); g.dir != "" && !unifiedOnly() {
		t.Error(g)
	}
}

func TestLimited(t *testing.T) {
	var b strings.Builder
	l := &limited{w: &b, left: 3}
	for range 3 {
		if n, err := l.Write([]byte("ab")); n != 2 || err != nil {
			t.Fatal(n, err)
		}
	}
	if b.String() != "aba" {
		t.Errorf("%q", b.String())
	}
}
