package orchestrator

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// C08: a static pod, of a file on the node, has another uid for the kubelet than in the API server. Its volumes are published.
func TestC08_AStaticPodIsFound(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(func(p *corev1.Pod) {
		p.UID, p.Annotations, p.Spec.RuntimeClassName = "of-the-mirror", map[string]string{corev1.MirrorPodAnnotationKey: "u1"}, nil
	}))...)
	if _, err := r.kubelet.NodePublishVolume(r.ctx(), request()); err != nil {
		t.Error(err)
	}
}

// Another pod of that name is another pod.
func TestC08_AnotherPodOfThatNameIsNotFound(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(func(p *corev1.Pod) {
		p.UID, p.Annotations = "another", map[string]string{corev1.MirrorPodAnnotationKey: "yet-another"}
	}))...)
	if _, err := r.kubelet.NodePublishVolume(r.ctx(), request()); err == nil {
		t.Error("it is published")
	}
}
