// Package orchestrator is the kubelet's half of CRUST (KEP-2857), for kubelets that lack it. It
// sits between the kubelet and a CSI driver, decides which volumes are deferred to a pod's sandbox,
// and has the runtime publish them when the sandbox runs.
//
// [Proxy] forwards every call to the driver unchanged. [Agent] adds to NodePublishVolume what the
// kubelet omits, decides with the pod's spec ([Pods]), stores a record of each deferral
// ([Records]), and carries it out when the container runtime reports a [Sandbox]. Package nri is
// the runtime's plugin that reports them. A program that learns of sandboxes in another way calls
// [Agent.Resume], [Agent.SandboxStarted], [Agent.ContainerStarts], [Agent.MountSources] and
// [Agent.SandboxEnds].
package orchestrator
