// Package crust is the CRUST protocol of KEP-2857 for Go programs: a client that
// looks whom it talks to, a server that looks who talks to it, the alpha fields
// of CSI messages, and the decision whether a volume is deferred to a pod's
// sandbox.
//
// A runtime implements crustv1alpha1.RuntimeAssistedStorageManagementServer and
// serves it with [Listen]; an orchestrator calls it through [Dial]; a CSI driver
// reads and writes the alpha fields with [SupportedFilesystems],
// [SetMountInfo] and the like. Package crusttest has a server in memory whose
// faults a test can script.
package crust
