#!/usr/bin/env bash
# Prints the package of the kernel's image that one of Debian's meta packages depends on: kernel-package.sh META.
set -euo pipefail
export LC_ALL=C # apt translates "Depends:"
depends=$(apt-cache depends --important "$1")
# The one versioned dependency of a meta package is the image itself.
package=$(sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' <<<"$depends" | head -n 1)
if [ -z "$package" ]; then
	echo "kernel-package: $1 depends on no linux-image-VERSION, but on: $depends" >&2
	exit 1
fi
echo "$package"
