package namespace

import crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"

// registration says how to create a namespace.
type registration struct {
	UserNamespace string `json:"userNamespace,omitempty"`
}

// Registration returns the path of the user namespace.
func (b *Backend) Registration(r *crustv1alpha1.RegisterSandboxRequest) any {
	return registration{r.GetNamespace().GetUserNamespace()}
}
