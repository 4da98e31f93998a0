#!/usr/bin/env bash
# Builds a Kubernetes from Go modules by name, into .cache/kubernetes/bin: the
# control plane and kubelet (one binary, named by argv[0]), kubectl (which starts
# thousands of times, and in half the time alone), etcd, containerd, runc and the
# CSI sidecars. Arguments are the parts to build; storage is Kubernetes' own suite
# for drivers. Go's caches make a second run cheap.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")"
bin=$(cd ../.. && pwd)/.cache/kubernetes/bin
mkdir -p "$bin"
# One set of flags everywhere: others are another cache.
export GOFLAGS="-mod=readonly -trimpath -buildvcs=false"
L='-s -w'
step() { local t=$SECONDS; echo "kubernetes: building $1"; shift; "$@"; echo "kubernetes: $((SECONDS - t)) s"; }

kube() {
	cd modules/kube
	local version c=github.com/kubernetes-csi
	version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
	# Earlier it was a link to hyper, which go build would write through.
	[ ! -L "$bin/kubectl" ] || rm "$bin/kubectl"
	CGO_ENABLED=0 go build -ldflags "$L -X k8s.io/component-base/version.gitVersion=$version" -o "$bin/" ./hyper \
		k8s.io/kubernetes/cmd/kubectl \
		$c/external-provisioner/v6/cmd/csi-provisioner $c/external-resizer/v2/cmd/csi-resizer \
		$c/external-snapshotter/v8/cmd/csi-snapshotter $c/external-snapshotter/v8/cmd/snapshot-controller
	for n in kube-apiserver kube-controller-manager kube-scheduler kubelet; do ln -sfn hyper "$bin/$n"; done
	rm -rf "$bin/crd"
	cp -rL "$(go list -m -f '{{.Dir}}' $c/external-snapshotter/client/v8)/config/crd" "$bin/crd"
	chmod -R u+w "$bin/crd"
}
containerd() {
	cd modules/containerd
	local m=github.com/containerd/containerd/v2 version
	version=$(go list -m -f '{{.Version}}' $m)
	CGO_ENABLED=0 go build -tags 'no_btrfs no_devmapper no_zfs' -ldflags "$L -X $m/version.Version=$version" -o "$bin/" $m/cmd/{containerd,containerd-shim-runc-v2,ctr}
}
etcd() { cd modules/etcd && CGO_ENABLED=0 go build -ldflags "$L" -o "$bin/etcd" go.etcd.io/etcd/server/v3; }
runc() { cd ../runtimes && CGO_ENABLED=1 go build -tags seccomp -ldflags "$L" -o "$bin/runc" github.com/opencontainers/runc; }
# Kubernetes' storage suite, and what runs it; only if it is asked for.
storage() {
	cd modules/kube
	CGO_ENABLED=0 go test -c -ldflags "$L" -o "$bin/storage.test" ./storage
	CGO_ENABLED=0 go build -ldflags "$L" -o "$bin/" ./agnhost github.com/onsi/ginkgo/v2/ginkgo
}
# Its tests of pods, likewise.
pods() {
	(storage)
	cd modules/kube
	CGO_ENABLED=0 go test -c -ldflags "$L" -o "$bin/pods.test" ./pods
}
# The next Kubernetes, beside everything else of this one: for health/.
next() {
	local n next=$bin/../next built=../parts/kube-1.37
	versions/build.sh kube-1.37
	rm -rf "$next"
	mkdir "$next"
	for n in "$bin"/*; do ln -s "../bin/${n##*/}" "$next/${n##*/}"; done
	ln -sfn "$built/kubectl" "$next/kubectl"
	for n in hyper kube-apiserver kube-controller-manager kube-scheduler kubelet; do ln -sfn "$built/hyper" "$next/$n"; done
}
for part in ${*:-runc containerd etcd kube}; do step $part eval "($part)"; done
