#!/usr/bin/env bash
# Writes modules/NAME.mod and .sum, with which build.sh builds another version of a program than
# modules beside this directory have:
#
#   module.sh kube v1.34.4         modules/kube-1.34.mod
#   module.sh containerd v1.7.35   modules/containerd-1.7.mod
#   module.sh runc v1.3.6          modules/runc-1.3.mod
#
# A row of ./list names them by these versions.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")"
here=$PWD part=$1 version=$2
minor=${version#v} minor=${minor%.*}
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
module() { echo "module github.com/crust-csi/crust-csi/test/kubernetes/versions/$part-$minor"; echo; echo "go $(go env GOVERSION | sed 's/^go//; s/ .*//')"; }
module >"$T/go.mod"
tools() { local t; for t; do echo "tool $t"; done >>"$T/go.mod"; }
case $part in
kube)
	tools k8s.io/kubernetes/cmd/kubectl
	cp -r ../modules/kube/hyper "$T/"
	file=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
	sed -n '/^godebug/p' "$file" >>"$T/go.mod"
	echo "require k8s.io/kubernetes $version" >>"$T/go.mod"
	# Kubernetes' own parts are of its version: in its own tree they are directories.
	sed -n 's|^\t*\(k8s.io/[^ ]*\) => \./staging.*|replace \1 => \1 v0.'"${version#v1.}"'|p' "$file" >>"$T/go.mod"
	;;
containerd)
	p=github.com/containerd/containerd
	[[ $version == v1.* ]] || p=$p/v2
	tools $p/cmd/{containerd,containerd-shim-runc-v2,ctr}
	echo "require $p $version" >>"$T/go.mod"
	;;
runc)
	tools github.com/opencontainers/runc
	echo "require github.com/opencontainers/runc $version" >>"$T/go.mod"
	;;
esac
mkdir -p modules
(cd "$T" && go mod tidy -e)
cp "$T/go.mod" "$here/modules/$part-$minor.mod"
cp "$T/go.sum" "$here/modules/$part-$minor.sum"
