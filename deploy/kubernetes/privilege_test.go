package kubernetes_test

import (
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/crust-csi/crust-csi/internal/privilege"
)

// roots are the containers that are root on the node, by what they are for.
// Whoever looks after the manifests adds to this list with a reason only.
var roots = map[string]bool{"csi-node": true, "crustd": true}

// Only what mounts is privileged, and sees the processes of the node; everything
// else has no capability, a file system that cannot be written, a seccomp profile
// and no way to more.
func TestA09_OnlyWhatMountsIsPrivileged(t *testing.T) {
	o := renderAny(t, "crust")
	seen := 0
	for _, d := range o.daemons {
		pod := d.Spec.Template.Spec
		for _, c := range pod.Containers {
			sc := c.SecurityContext
			if sc == nil {
				t.Errorf("%s: %s has no securityContext", d.Name, c.Name)
				continue
			}
			if !is(sc.ReadOnlyRootFilesystem, true) {
				t.Errorf("%s: %s can write to its image", d.Name, c.Name)
			}
			if roots[c.Name] {
				seen++
				if len(pod.Containers) != 1 {
					t.Errorf("%s: %s shares its pod with %d others", d.Name, c.Name, len(pod.Containers)-1)
				}
				continue
			}
			if pod.HostPID || pod.HostNetwork || pod.HostIPC {
				t.Errorf("%s: %s is in namespaces of the host's", d.Name, c.Name)
			}
			if sc.Privileged != nil && *sc.Privileged || !is(sc.AllowPrivilegeEscalation, false) {
				t.Errorf("%s: %s is privileged, or can become so", d.Name, c.Name)
			}
			if sc.Capabilities == nil || len(sc.Capabilities.Add) > 0 || !slices.Equal(sc.Capabilities.Drop, []corev1.Capability{"ALL"}) {
				t.Errorf("%s: %s has capabilities: %+v", d.Name, c.Name, sc.Capabilities)
			}
			if p := profile(pod, c); p == nil || p.Type != corev1.SeccompProfileTypeRuntimeDefault {
				t.Errorf("%s: %s has the seccomp profile %+v", d.Name, c.Name, p)
			}
		}
	}
	if seen != len(roots) {
		t.Errorf("%d of %d privileged containers were found", seen, len(roots))
	}
}

func profile(pod corev1.PodSpec, c corev1.Container) *corev1.SeccompProfile {
	if c.SecurityContext.SeccompProfile != nil || pod.SecurityContext == nil {
		return c.SecurityContext.SeccompProfile
	}
	return pod.SecurityContext.SeccompProfile
}

// The sidecars have nothing of the node but the driver's socket, and connect to it
// as a user who is not root.
func TestA09_SidecarsHaveTheSocketAndNothingElse(t *testing.T) {
	o := renderAny(t, "base")
	for _, name := range []string{"csi-sidecars", "csi-resizer"} {
		pod := o.pods()[name]
		for _, v := range pod.Volumes {
			if v.HostPath != nil && v.HostPath.Path != "/var/lib/kubelet/plugins/"+driver {
				t.Errorf("%s mounts the node's %s", name, v.HostPath.Path)
			}
		}
		sc := pod.SecurityContext
		if sc == nil || !is(sc.RunAsNonRoot, true) || sc.RunAsUser == nil || *sc.RunAsUser == 0 || len(sc.SupplementalGroups) != 1 {
			t.Fatalf("%s: %+v", name, sc)
		}
		args := o.daemon(t, "csi-node").Spec.Template.Spec.Containers[0].Args
		if want := "--endpoint-group=285700"; !slices.Contains(args, want) || sc.SupplementalGroups[0] != 285700 {
			t.Errorf("csi-node has no %s, or %s is in group %d", want, name, sc.SupplementalGroups[0])
		}
	}
}

// Who is root on the node has no token, and those that have one do not get it
// unasked.
func TestA09_TokensAreWhereTheyAreNeeded(t *testing.T) {
	o := renderAny(t, "crust")
	bound := map[string]bool{}
	for _, b := range o.clusterBindings {
		for _, s := range b.Subjects {
			bound[s.Name] = true
		}
	}
	for _, b := range o.bindings {
		for _, s := range b.Subjects {
			bound[s.Name] = true
		}
	}
	with := map[string]bool{"csi-sidecars": true, "csi-resizer": true, "csi-steward": true, "crust-agent": true}
	for name, pod := range o.pods() {
		if !is(pod.AutomountServiceAccountToken, false) {
			t.Errorf("%s: every container gets a token", name)
		}
		token := slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Projected != nil })
		if token != with[name] || bound[pod.ServiceAccountName] != with[name] {
			t.Errorf("%s: a token: %v; rights of %s: %v", name, token, pod.ServiceAccountName, bound[pod.ServiceAccountName])
		}
	}
}

// What runs as root gives back what it does not need, by itself: container
// runtimes ignore capabilities.drop of a privileged container.
func TestA09_RootsKeepTheCapabilitiesThatTheyNeed(t *testing.T) {
	o := renderAny(t, "crust")
	needs := map[string]privilege.Needs{"csi-node": privilege.Storage, "crustd": privilege.Sandboxes}
	for _, d := range o.daemons {
		for _, c := range d.Spec.Template.Spec.Containers {
			if want := "--capabilities=" + needs[c.Name].List(); needs[c.Name] != nil && !slices.Contains(c.Args, want) {
				t.Errorf("%s: no %s in %v", c.Name, want, c.Args)
			}
		}
	}
}

// Nobody may read secrets or pods of everybody, or write to what a policy does not
// look at.
func TestA09_EveryWriteOfATokenIsLookedAt(t *testing.T) {
	o := renderAny(t, "base")
	looked := map[string][]admissionv1.OperationType{} // by account, group and resource
	for _, p := range o.policies {
		if p.Spec.FailurePolicy == nil || *p.Spec.FailurePolicy != admissionv1.Fail {
			t.Errorf("%s lets through what it cannot judge", p.Name)
		}
		account := ""
		for _, a := range []string{"csi-sidecars", "csi-resizer", "csi-steward"} {
			if m := p.Spec.MatchConditions; len(m) == 1 &&
				m[0].Expression == `request.userInfo.username == "system:serviceaccount:`+namespace+`:`+a+`"` {
				account = a
			}
		}
		if account == "" {
			t.Errorf("%s is for %+v", p.Name, p.Spec.MatchConditions)
		}
		if v := p.Spec.Validations; account == "csi-sidecars" && (len(v) < 2 || v[0].Expression != `variables.node != ""`) {
			t.Errorf("%s takes tokens that name no node", p.Name)
		}
		bound := slices.ContainsFunc(o.policyBindings, func(b admissionv1.ValidatingAdmissionPolicyBinding) bool {
			return b.Spec.PolicyName == p.Name && b.Spec.MatchResources == nil &&
				slices.Equal(b.Spec.ValidationActions, []admissionv1.ValidationAction{admissionv1.Deny})
		})
		if !bound {
			t.Errorf("%s denies nothing: it has no binding", p.Name)
		}
		for _, r := range p.Spec.MatchConstraints.ResourceRules {
			for _, name := range r.Resources {
				key := account + " " + r.APIGroups[0] + "/" + name
				looked[key] = append(looked[key], r.Operations...)
			}
		}
	}
	verbs := map[string]admissionv1.OperationType{
		"create": admissionv1.Create, "update": admissionv1.Update, "patch": admissionv1.Update, "delete": admissionv1.Delete}
	rules := map[string][]rbacv1.PolicyRule{} // by account: roles are called as theirs
	for _, r := range o.clusterRoles {
		account := strings.Replace(r.Name, "crust-csi-", "csi-", 1)
		rules[account] = append(rules[account], r.Rules...)
	}
	for _, r := range o.roles {
		for _, rule := range r.Rules {
			if slices.Equal(rule.Resources, []string{"leases"}) && r.Name == "csi-resizer" {
				continue // of its own namespace: who of the resizers leads
			}
			rules[r.Name] = append(rules[r.Name], rule)
		}
	}
	for account, rules := range rules {
		for _, r := range rules {
			for _, group := range r.APIGroups {
				for _, name := range r.Resources {
					if name == "secrets" || strings.Contains(name+group, "*") {
						t.Errorf("%s/%s: %v", group, name, r.Verbs)
					}
					for _, verb := range r.Verbs {
						op, writes := verbs[verb]
						if !writes && !slices.Contains([]string{"get", "list", "watch"}, verb) {
							t.Errorf("%s/%s: the verb %s", group, name, verb)
						}
						// Events change nothing; forged ones are residual, see SECURITY.md.
						if writes && name != "events" && !slices.Contains(looked[account+" "+group+"/"+name], op) {
							t.Errorf("%s: %s of %s/%s is looked at by no policy", account, verb, group, name)
						}
					}
				}
			}
		}
	}
	for _, r := range o.clusterRoles {
		for _, rule := range r.Rules {
			if slices.Contains(rule.Resources, "pods") {
				t.Errorf("%s reads every pod of the cluster", r.Name)
			}
		}
	}
}
