package inventory

// The keys by which the provisioner tells for whom a volume is (its flag
// --extra-create-metadata). They are kept with the volume.
const (
	ClaimNamespaceKey = "csi.storage.k8s.io/pvc/namespace"
	ClaimNameKey      = "csi.storage.k8s.io/pvc/name"
)

// ClaimOf is NAMESPACE/NAME of the claim that a volume with these parameters was made
// for; empty if nobody told.
func ClaimOf(parameters map[string]string) string {
	namespace, name := parameters[ClaimNamespaceKey], parameters[ClaimNameKey]
	if namespace == "" || name == "" {
		return name
	}
	return namespace + "/" + name
}
