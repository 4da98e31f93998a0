#!/usr/bin/env bash
# The images of the test cluster beside the project's own: the sidecars under the
# names that deploy/kubernetes has, a pause, and busybox.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.."
bin=$PWD/.cache/kubernetes/bin out=$PWD/.cache/image
export SOURCE_DATE_EPOCH=1767225600
image() { # archive name entrypoint files...
	local archive=$out/$1.tar name=$2 entrypoint=()
	for w in $3; do entrypoint+=(-entrypoint "$w"); done
	"$out/bin/image" -out "$archive" -name "$name" "${entrypoint[@]}" "${@:4}"
}
for s in provisioner resizer snapshotter; do
	name=$(sed -n "s|.*image: \(.*/csi-$s:.*\)|\1|p" deploy/kubernetes/base/*.yaml)
	image "csi-$s" "$name" "/csi-$s" "$bin/csi-$s=/csi-$s"
done
links=()
for a in $(/bin/busybox --list); do [ "$a" = busybox ] || links+=("/bin/$a->busybox"); done
echo root:x:0:0::/:/bin/sh >"$out/passwd"
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$out/bin/udp-echo" ./test/crust/echo # busybox has no server of datagrams
image busybox localhost/test/busybox:1 "/bin/sleep 1000000000" /bin/busybox=/bin/busybox "$out/bin/udp-echo=/bin/udp-echo" "$out/passwd=/tmp/.keep=644" "$out/passwd=/etc/passwd=644" "${links[@]}"
image pause localhost/test/pause:1 "/bin/sleep 1000000000" /bin/busybox=/bin/busybox "/bin/sleep->busybox"
