// Package apiserver configures how daemons reach the API server.
package apiserver

import (
	"fmt"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Config returns the configuration of a kubeconfig or, if it is empty, of the pod.
func Config(kubeconfig string) (*rest.Config, error) {
	from := rest.InClusterConfig
	if kubeconfig != "" {
		from = func() (*rest.Config, error) { return clientcmd.BuildConfigFromFlags("", kubeconfig) }
	}
	config, err := from()
	if err != nil {
		return nil, fmt.Errorf("the API server: %w (outside of a cluster: give --kubeconfig)", err)
	}
	return config, nil
}
