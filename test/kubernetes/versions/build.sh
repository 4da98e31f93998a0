#!/usr/bin/env bash
# Builds a program of another version, of its file in modules, into
# .cache/kubernetes/parts/NAME: build.sh kube-1.34 containerd-1.7 runc-1.3
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")"
here=$PWD parts=$(cd ../../.. && pwd)/.cache/kubernetes/parts
# The flags of ../build.sh: others are another cache.
export GOFLAGS="-mod=readonly -trimpath -buildvcs=false"
L='-s -w'
for part; do
	file=$here/modules/$part.mod out=$parts/$part t=$SECONDS
	# The same file gives the same program.
	if cmp -s "$file" "$out/mod"; then continue; fi
	echo "versions: building $part"
	rm -rf "$out" && mkdir -p "$out"
	case $part in
	kube-*)
		version=$(sed -n 's|^.*k8s.io/kubernetes \(v[^ ]*\)$|\1|p' "$file")
		cd ../modules/kube
		CGO_ENABLED=0 nice -n 5 go build -p 2 -modfile="$file" -ldflags "$L -X k8s.io/component-base/version.gitVersion=$version" -o "$out/" ./hyper \
			k8s.io/kubernetes/cmd/kubectl
		for n in kube-apiserver kube-controller-manager kube-scheduler kubelet; do ln -sfn hyper "$out/$n"; done
		;;
	containerd-*)
		version=$(sed -n 's|^.*github.com/containerd/containerd\(/v2\)\? \(v[^ ]*\).*$|\2|p' "$file")
		c=github.com/containerd/containerd
		! grep -q "$c/v2 v" "$file" || c=$c/v2
		cd ../modules/containerd
		CGO_ENABLED=0 nice -n 5 go build -p 2 -modfile="$file" -tags 'no_btrfs no_devmapper no_zfs' -ldflags "$L -X $c/version.Version=$version" \
			-o "$out/" $c/cmd/{containerd,containerd-shim-runc-v2,ctr}
		;;
	runc-*)
		cd ../../runtimes
		nice -n 5 go build -p 2 -modfile="$file" -tags seccomp -ldflags "$L" -o "$out/runc" github.com/opencontainers/runc
		;;
	esac
	cd "$here"
	cp "$file" "$out/mod"
	echo "versions: $part after $((SECONDS - t)) s"
done
