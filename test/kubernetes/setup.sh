#!/usr/bin/env bash
# Installs what the test cluster needs of a Debian 12 machine, beside scripts/setup.sh.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive
packages=()
need() { [ -n "$(command -v "$1")" ] || packages+=("$2"); }
need ip iproute2
need socat socat
need openssl openssl
need getfattr attr
need wget wget
need nsenter util-linux
need nc.openbsd netcat-openbsd
need curl curl
need mmdebstrap mmdebstrap
[ -x /usr/lib/cni/ptp ] || packages+=(containernetworking-plugins)
echo '#include <seccomp.h>' | gcc -E - >/dev/null 2>&1 || packages+=(libseccomp-dev)
if [ ${#packages[@]} -gt 0 ]; then
	echo "kubernetes: installing ${packages[*]}"
	scripts/apt.sh install "${packages[@]}"
fi
