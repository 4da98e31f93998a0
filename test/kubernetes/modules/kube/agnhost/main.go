// Command agnhost stands in for the image of that name in Kubernetes' end-to-end tests: the commands that they use here, from Kubernetes'
// own packages.
package main

import (
	"os"

	"github.com/spf13/cobra"
	"k8s.io/kubernetes/test/images/agnhost/connect"
	"k8s.io/kubernetes/test/images/agnhost/dns"
	entrypoint "k8s.io/kubernetes/test/images/agnhost/entrypoint-tester"
	grpchealthchecking "k8s.io/kubernetes/test/images/agnhost/grpc-health-checking"
	"k8s.io/kubernetes/test/images/agnhost/liveness"
	logsgen "k8s.io/kubernetes/test/images/agnhost/logs-generator"
	"k8s.io/kubernetes/test/images/agnhost/mounttest"
	"k8s.io/kubernetes/test/images/agnhost/netexec"
	"k8s.io/kubernetes/test/images/agnhost/nonewprivs"
	"k8s.io/kubernetes/test/images/agnhost/pause"
	servehostname "k8s.io/kubernetes/test/images/agnhost/serve-hostname"
	testwebserver "k8s.io/kubernetes/test/images/agnhost/test-webserver"
)

func main() {
	root := &cobra.Command{Use: "agnhost"}
	root.AddCommand(connect.CmdConnect, dns.CmdDNSServerList, dns.CmdDNSSuffix, dns.CmdEtcHosts, entrypoint.CmdEntrypointTester,
		grpchealthchecking.CmdGrpcHealthChecking, liveness.CmdLiveness, logsgen.CmdLogsGenerator, mounttest.CmdMounttest,
		netexec.CmdNetexec, nonewprivs.CmdNoNewPrivs, pause.CmdPause, servehostname.CmdServeHostname, testwebserver.CmdTestWebserver)
	if len(os.Args) == 1 {
		root.SetArgs([]string{"pause"}) // as the image's default argument
	}
	if root.Execute() != nil {
		os.Exit(1)
	}
}
