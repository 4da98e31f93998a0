//go:build kubernetes && !fleet

package kubernetes_test

// whole is set in make test-fleet: what takes long, or needs the images of releases, runs too.
const whole = false
