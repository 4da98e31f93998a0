// Package crust is the CRUST protocol of KEP-2857 for Go programs: a client that
// looks whom it talks to, a server that looks who talks to it, the alpha fields
// of CSI messages, and the decision whether a volume is deferred to a pod's
// sandbox.
//
// # The life of a deferred volume
//
//  1. The orchestrator asks the runtime what it can (RuntimeGetCapabilities,
//     RuntimeGetSupportedFileSystems), and [Decide] says whether the pod's volume is
//     deferred.
//  2. If so, NodePublishVolume carries the runtime's file systems ([SetSupportedFilesystems]).
//     The CSI driver reads them ([SupportedFilesystems]). It answers with what is to be
//     mounted ([SetMountInfo]), and mounts nothing. A driver that answers without it has
//     mounted the volume itself ([MountInfoOf]).
//  3. When the sandbox is there, the orchestrator sends RuntimePublishVolume to the
//     runtime's socket, and the runtime mounts the volume inside.
//  4. Stats and growth of the file system are asked of the runtime: the driver says of
//     which volume ([SetStatsSource], [SetExpandSource]).
//  5. RuntimeUnpublishVolume comes before NodeUnpublishVolume, or the sandbox ends. While
//     neither has happened the device is in use, though the host has not mounted it.
//
// # Who is who
//
// A runtime implements crustv1alpha1.RuntimeAssistedStorageManagementServer and serves
// it with [Listen]; package sandbox is such a server, whose kinds of sandboxes are
// backends. An orchestrator calls it through [Dial]; package orchestrator is one. Both
// ask the kernel which user is at the other end, and talk to nobody else. Package
// crusttest has a server in memory whose faults a test can script, and the suite that a
// backend passes.
//
// # What is safe when
//
// A [Client] may be used by several goroutines. Calls may be repeated: each has the same
// end as once. A code of Unavailable or DeadlineExceeded leaves open whether the runtime
// has done what was asked; only an unpublish that succeeds, or the end of the sandbox,
// says that a device is free.
//
// # What it is not for
//
// The protocol gives a runtime no right to a device: which ones it may open is the
// runtime's own list. It carries no data of the volume, and no credentials.
package crust
