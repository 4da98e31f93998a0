// Package orchestrator is the kubelet's half of CRUST (KEP-2857), for kubelets
// that do not have it: it stands between the kubelet and a CSI driver, decides
// which volumes are deferred to a pod's sandbox, and has the runtime publish
// them when the sandbox is there.
//
// [Proxy] forwards every call to the driver as it is. [Agent] adds to those of
// NodePublishVolume what the kubelet does not tell, decides with the pod at hand
// ([Pods]), keeps a record of each deferral, and carries them out as an NRI
// plugin ([Plugin]).
package orchestrator
