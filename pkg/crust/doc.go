// Package crust is the CRUST protocol of KEP-2857 for Go programs. It has a client and a server
// listener that verify their peer's uid, the alpha fields of CSI messages, and the decision whether
// a volume is deferred to a pod's sandbox.
//
// # The life of a deferred volume
//
//  1. The orchestrator queries the runtime's capabilities (RuntimeGetCapabilities,
//     RuntimeGetSupportedFileSystems). [Decide] determines whether the pod's volume is deferred.
//  2. If so, NodePublishVolume carries the runtime's file systems ([SetSupportedFilesystems]).
//     The CSI driver reads them ([SupportedFilesystems]), answers with the mount to make
//     ([SetMountInfo], [OptionMap]) and mounts nothing. If the answer has no such mount, the driver has
//     mounted the volume itself ([MountInfoOf]).
//  3. When the sandbox runs, the orchestrator sends RuntimePublishVolume ([OptionList]) to the
//     runtime's socket. The runtime mounts the volume inside, or answers that it is pending: then
//     the sandbox holds the device (O_EXCL), and mounts it when its container starts.
//  4. The runtime reports the stats of the file system and grows it. The driver names the
//     volume ([SetStatsSource], [SetExpandSource]).
//  5. UnpublishVolume, or the end of the sandbox, comes before NodeUnpublishVolume.
//     Until then the device is in use, though the host has not mounted it.
//
// # Who is who
//
// A runtime implements crustv1alpha1.RuntimeAssistedStorageManagementServer and serves it with
// [Listen]. Package sandbox is such a server; its kinds of sandboxes are backends. An orchestrator
// calls it through [Dial]. Package orchestrator is one. Both sides ask the kernel for their peer's
// uid and refuse any uid that is not allowed. Package crusttest has a server in memory whose faults
// a test can script, and the test suite for backends.
//
// # Concurrency and retries
//
// Several goroutines may use a [Client]. Every call may be repeated with the same result. A call that
// fails with Unavailable or DeadlineExceeded may have taken effect: repeat it. A device is free only
// after a successful unpublish or the end of the sandbox.
//
// # What it is not for
//
// The protocol gives a runtime no right to a device: the runtime's own list says which devices it
// may open. It carries no data of the volume and no credentials.
package crust
