// Package storage is the part of Kubernetes' end-to-end tests for CSI drivers that a file describes
// (External.Storage of test/e2e), and nothing else of them.
package storage

import (
	"testing"

	"github.com/crust-csi/crust-csi/test/kubernetes/modules/kube/suite"
	"k8s.io/kubernetes/test/utils/image"

	_ "k8s.io/kubernetes/test/e2e/storage/external"
)

func TestMain(m *testing.M) {
	suite.Main(m, image.Agnhost, image.BusyBox, image.GlibcDnsTesting, image.Nginx)
}

func TestStorage(t *testing.T) { suite.Run(t, "a CSI driver") }
