package crust

// The states of a volume in a sandbox, as SandboxManagement lists them.
const (
	// StatePublishing: RuntimePublishVolume has begun, and has not succeeded.
	StatePublishing = "publishing"
	// StatePending: the sandbox has the volume, and mounts it when its container starts.
	StatePending = "pending"
	// StatePublished: the volume is mounted.
	StatePublished = "published"
)
