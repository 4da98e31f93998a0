package scrub

import (
	"strings"
	"testing"
)

const secret = "hunter2-do-not-tell"

func TestB08_OptionsThatCarryPasswordsAreLeftOut(t *testing.T) {
	for in, want := range map[string]string{
		"":                                       "",
		"rw,noatime,data=ordered":                "rw,noatime,data=ordered",
		"rw,password=" + secret + ",vers=3.0":    "rw," + LeftOut + ",vers=3.0",
		"username=me,pass=" + secret:             LeftOut + "," + LeftOut,
		secret:                                   LeftOut,
		"context=system_u:object_r:file_t:s0,ro": "context=system_u:object_r:file_t:s0,ro",
	} {
		if got := Options(in); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}

func TestB08_MountLinesKeepWhatIsNoSecret(t *testing.T) {
	const line = "36 35 98:0 / /var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/pv/mount rw,noatime master:1 - "
	shown := func(option string) string {
		return strings.Replace(line, "noatime", "noatime,"+option, 1) + "ext4 a rw"
	}
	for in, want := range map[string]string{
		line + "ext4 /dev/loop3 rw,errors=continue":                          line + "ext4 /dev/loop3 rw,errors=continue",
		line + "cifs //me:" + secret + "@server/share rw,password=" + secret: "",
		line + "cifs smb://me:" + secret + "@server/share rw,pass=" + secret: "",
		line + "nfs4 server:/share rw,vers=4.2,addr=10.0.0.1":                line + "nfs4 server:/share rw,vers=4.2,addr=10.0.0.1",
		line + "fuse." + "x source rw," + secret + ",more " + secret:         "",
		"no line of mountinfo " + secret:                                     LeftOut,
		shown("x=" + secret):                                                 shown(LeftOut),
	} {
		got := MountLine(in)
		if strings.Contains(got, secret) || want != "" && got != want {
			t.Errorf("%q became\n%q, want\n%q", in, got, want)
		}
	}
}

func TestB08_OnlyKnownFieldsOfRecordsAreKept(t *testing.T) {
	got, err := Record([]byte(`{"kind": "crust-csi.staged", "version": 1, "token": "` + secret + `", "data": {
		"volumeID": "pool.v1", "device": {"Path": "/dev/loop1", "Major": 7}, "share": "nfs://me:` + secret + `@server/share", "accessMode": 1,
		"superblockOptions": "noatime,password=` + secret + `", "secrets": {"password": "` + secret + `"}, "nodeStageSecret": "` + secret + `",
		"options": {"ro": "", "password": "` + secret + `", "` + secret + `": ""}, "volume": {"parameters": {"pool": "p", "password": "` + secret + `"}}}}`))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(got), secret) {
		t.Errorf("the secret is there:\n%s", got)
	}
	for _, want := range []string{`"volumeID": "pool.v1"`, `"/dev/loop1"`, `"noatime,` + LeftOut + `"`, `"ro": ""`, `"pool": "p"`,
		`"accessMode": 1`} {
		if !strings.Contains(string(got), want) {
			t.Errorf("%s is not there:\n%s", want, got)
		}
	}
	for _, foreign := range []string{secret, `{"kind": "Config", "users": [{"token": "` + secret + `"}]}`, `"` + secret + `"`} {
		if got, err := Record([]byte(foreign)); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %s %v", foreign, got, err)
		}
	}
}

func TestB08_ArgumentsThatAreNoFlagsAreLeftOut(t *testing.T) {
	got := strings.Join(Args([]string{"csi-node", "--pool", "a=loop:/pool", "-v=4", "--token=" + secret, "--password", secret, secret,
		"--idmap-probe=false"}), " ")
	if want := "csi-node --pool a=loop:/pool -v=4 " + strings.Repeat(LeftOut+" ", 4) + "--idmap-probe=false"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
