#!/usr/bin/env bash
# Shows a SELinux label that a volume has from the moment it is mounted. Runs in
# a guest with SELinux (make demo-selinux), which is thrown away afterwards.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
mkdir "$dir/kubelet"
bin/csi-node --endpoint "unix://$dir/csi.sock" --node-id demo --pool "demo=loop:$dir/pool" --state-dir "$dir/state" --kubelet-dir "$dir/kubelet" 2>"$dir/log" &
ctl() { bin/crustctl --endpoint "unix://$dir/csi.sock" --kubelet-dir "$dir/kubelet" "$@"; }
for _ in $(seq 600); do [ -S "$dir/csi.sock" ] && break; sleep 0.1; done

echo "Linux $(uname -r), SELinux: $(getenforce)"
ctl volume create data --size 256Mi -o json >"$dir/out"
id=$(sed -nE 's/.*"volume_id": "([^"]+)".*/\1/p' "$dir/out")
target=$dir/kubelet/pods/a/mount
label=system_u:object_r:svirt_image_t:s0:c1,c2

ctl volume publish "$id" "$target" >/dev/null
mkdir "$target/dir" && seq 1000 | (cd "$target/dir" && xargs touch)
echo
echo "Published without a label, 1,000 files written:"
ls -Zd "$target/dir" "$target/dir/7"
ctl volume unpublish "$id" "$target" >/dev/null

ctl volume publish "$id" "$target" --mount-option "context=\"$label\"" >/dev/null
echo
echo "Published with context=$label, no file was touched:"
ls -Zd "$target/dir" "$target/dir/7"
echo
echo "Another label for the same volume, meanwhile:"
ctl volume publish "$id" "$dir/kubelet/pods/b/mount" --mount-option 'context="system_u:object_r:svirt_image_t:s0:c3"' 2>&1 | fold -s -w 120 || true
ctl volume unpublish "$id" "$target" >/dev/null
ctl volume publish "$id" "$target" >/dev/null
echo
echo "Published without a label again, the disk has what it had:"
ls -Zd "$target/dir" "$target/dir/7"
ctl volume unpublish "$id" "$target" >/dev/null
ctl volume delete "$id" >/dev/null
kill %1
wait
