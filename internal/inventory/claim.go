package inventory

// The keys by which the provisioner names a volume's claim (its flag --extra-create-metadata). They
// are stored with the volume.
const (
	ClaimNamespaceKey = "csi.storage.k8s.io/pvc/namespace"
	ClaimNameKey      = "csi.storage.k8s.io/pvc/name"
)

// ClaimOf returns the NAMESPACE/NAME of the claim that a volume with these parameters was made for;
// empty if unknown.
func ClaimOf(parameters map[string]string) string {
	namespace, name := parameters[ClaimNamespaceKey], parameters[ClaimNameKey]
	if namespace == "" || name == "" {
		return name
	}
	return namespace + "/" + name
}
