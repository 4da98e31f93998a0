//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// C15, C21: the kubelet binds sub-paths of a placeholder, and containers get those of the volume in their sandbox: directories that are
// there, a file, and directories that are made, for every container of the pod, also after a restart. One that leads out is refused.
func TestC15_C21_SubPathsOfADeferredVolume(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
	const image = `image: "localhost/test/busybox:1"`
	s.apply(fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {%s,
terminationGracePeriodSeconds: 1, securityContext: {fsGroup: 4321},
volumes: [{name: data, persistentVolumeClaim: {claimName: data}}],
initContainers: [
  {name: first, %s,
   command: [sh, -c, "mkdir /data/there && echo text >/data/file && ln -s /etc /data/evil && echo first >/new/f"],
   volumeMounts: [
     {name: data, mountPath: /data},
     {name: data, mountPath: /new, subPath: by/the/first}]}],
containers: [
  {name: c, %s,
   command: [sh, -c, "until [ -e /made/end ]; do sleep 0.1; done; rm /made/end"],
   env: [{name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}],
   volumeMounts: [
     {name: data, mountPath: /there, subPath: there/},
     {name: data, mountPath: /file, subPath: file, readOnly: true},
     {name: data, mountPath: /new, subPath: by/the/first},
     {name: data, mountPath: /made, subPath: made},
     {name: data, mountPath: /mine, subPathExpr: of/$(POD)},
     {name: data, mountPath: /whole, subPath: .}]},
  {name: out, %s,
   volumeMounts: [{name: data, mountPath: /evil, subPath: evil}]}]}}`, sandboxed, image, image, image))
	runs := func() {
		t.Helper()
		s.until(90*time.Second, "the container runs", func() (string, bool) {
			got, err := s.tryRun("p", "true")
			return fmt.Sprint(got, err, s.get("pod/p", ".status.containerStatuses")), err == nil
		})
	}
	runs()
	s.said("Pod/p", "MountDeferred: volume pvc-.* \\(ext4\\) is left to the pod's sandbox")
	s.said("Pod/p", "leads out of the volume")
	s.onlyPlaceholder("p", "data")
	const look = "cat /file /new/f; stat -c '%a %u %g' /made; ls /there; grep -c ' - ext4 ' /proc/self/mountinfo; touch /file 2>&1"
	if got, _ := s.tryRun("p", look); !strings.HasPrefix(got, "text\nfirst\n2775 0 4321\n6\n") || !strings.Contains(got, "Read-only") {
		t.Errorf("in the container: %q", got)
	}
	s.run("p", "echo again >/made/f; echo $$ >/there/f; cat /whole/made/f; echo mine >/mine/f")
	bound := onNode(t, "grep volume-subpaths /proc/1/mountinfo | grep -v 'tmpfs crust-deferred' || true")
	if strings.Contains(bound, s.get("pod/p", ".metadata.uid")) {
		t.Errorf("the node has bound\n%s", bound)
	}
	// The container ends, and is started again. What it had is not what it was: a directory is gone, and a file was replaced.
	s.run("p", "cd /whole && rm -rf there && echo new >next && mv next file; >/made/end")
	s.until(2*time.Minute, "the container has restarted", func() (string, bool) {
		got := s.get("pod/p", ".status.containerStatuses[?(@.name=='c')].restartCount")
		return got, got != "0" && got != ""
	})
	runs()
	if got := s.run("p", "cat /made/f /file; ls /there; echo back >/whole/there/f; cat /there/f"); got != "again\nnew\nback" {
		t.Errorf("after a restart: %q", got)
	}
	target := s.target("p", "data")
	s.delete("p")
	if got := mountOf(t, target); got != "" {
		t.Errorf("left: %s", got)
	}
	s.pod("q", []string{"data:/data"})
	if got := s.run("q", "cat /data/made/f /data/by/the/first/f /data/file /data/of/p/f"); got != "again\nfirst\nnew\nmine" {
		t.Errorf("the node's pod reads %q", got)
	}
}
