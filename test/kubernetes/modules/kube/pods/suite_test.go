// Package pods is the part of Kubernetes' end-to-end tests about what a pod is for its user: its containers, files, network and end
// (test/e2e/common), and nothing else of them.
package pods

import (
	"testing"

	"github.com/crust-csi/crust-csi/test/kubernetes/modules/kube/suite"
	"k8s.io/kubernetes/test/utils/image"

	_ "k8s.io/kubernetes/test/e2e/common/network"
	_ "k8s.io/kubernetes/test/e2e/common/node"
	_ "k8s.io/kubernetes/test/e2e/common/storage"
)

func TestMain(m *testing.M) {
	suite.Main(m, image.Agnhost, image.BusyBox, image.GlibcDnsTesting, image.Nginx, image.Pause)
}

func TestPods(t *testing.T) { suite.Run(t, "pods") }
