package main

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/crust-csi/crust-csi/internal/nodelabels"
)

// writeLabels writes the labels of the node. The kubelet restarts it on failure.
func writeLabels(ctx context.Context, client kubernetes.Interface, node, output string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	n, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("the labels of node %s: %w", node, err)
	}
	if err := nodelabels.Write(output, n.Labels); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	return nil
}
