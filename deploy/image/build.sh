#!/usr/bin/env bash
# Builds the OCI images of the project, as archives in .cache/image, without a
# container daemon: localhost/crust-csi/{csi-node,crustd,crust-agent}:TAG. Load one with
# `ctr -n k8s.io images import`, `skopeo copy oci-archive:...` or `crane push`.
# TAG (dev) and VERSION (0.1.0-dev) are variables. The same binaries and Debian
# packages give the same bytes.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$PWD/.cache/image
tag=${TAG:-dev}
export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1767225600}
mkdir -p "$out/bin"

# A new list of packages makes a new base.
packages=$(paste -sd, deploy/image/packages)
base=$out/base-$(echo "$packages" | sha256sum | head -c 12).root
if [ ! -e "$base" ]; then
	command -v mmdebstrap >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends mmdebstrap >/dev/null; }
	echo "image: making the base of Debian packages (a minute, once)"
	rm -f "$out"/base-*.root
	mmdebstrap --quiet --variant=essential --aptopt='APT::Install-Recommends "false"' --dpkgopt='path-exclude=/usr/share/doc/*' \
		--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' --include="$packages" bookworm "$base.tar"
	mv "$base.tar" "$base"
fi

export CGO_ENABLED=0
go build -trimpath -buildvcs=false -ldflags "-s -w -X github.com/crust-csi/crust-csi/internal/version.number=${VERSION:-0.1.0-dev}" -o "$out/bin/" ./cmd/csi-node ./cmd/crustctl ./cmd/crustd ./cmd/crust-oci ./cmd/crust-agent
go build -C deploy/image -o "$out/bin/image" .
image() { echo "image: $2"; "$out/bin/image" -out "$out/$1.tar" -name "$2" "${@:3}"; }
cd "$out/bin"
image csi-node "localhost/crust-csi/csi-node:$tag" -base "$base" -entrypoint /usr/local/bin/csi-node csi-node=/usr/local/bin/csi-node crustctl=/usr/local/bin/crustctl
image crustd "localhost/crust-csi/crustd:$tag" -entrypoint /usr/local/bin/crustd crustd=/usr/local/bin/crustd crust-oci=/usr/local/bin/crust-oci crustctl=/usr/local/bin/crustctl
image crust-agent "localhost/crust-csi/crust-agent:$tag" -entrypoint /usr/local/bin/crust-agent crust-agent=/usr/local/bin/crust-agent
