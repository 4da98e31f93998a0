package qemu

import (
	"context"
	"errors"
	"log/slog"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
)

type Backend struct{}

func New(string, *slog.Logger) (*Backend, error)                 { return &Backend{}, nil }
func (b *Backend) Close() error                                  { return nil }
func (b *Backend) Kind() string                                  { return "qemu" }
func (b *Backend) Capabilities() []crust.Capability              { return nil }
func (b *Backend) FileSystems(context.Context) ([]string, error) { return nil, nil }
func (b *Backend) Open(context.Context, sandbox.Spec) (sandbox.Sandbox, error) {
	return nil, errors.New("todo")
}
