#!/usr/bin/env bash
# Shows a volume that is mounted by a microVM and never by this machine: csi-node
# on a pool of loop files, crustd with the backend qemu, a guest with a kernel of
# its own. Leaves nothing behind, whatever happens.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/sbin:/sbin

dir=$(mktemp -d -t crust-demo.XXXXXX)
kubelet=$dir/kubelet
mkdir "$kubelet"
if [ -t 1 ]; then bold=$(tput bold) dim=$(tput dim) plain=$(tput sgr0); else bold='' dim='' plain=''; fi
driver='' server=''

ctl() { bin/crustctl --endpoint "unix://$dir/csi.sock" --kubelet-dir "$kubelet" "$@"; }
box() { bin/crustctl --endpoint "unix://$dir/csi.sock" --kubelet-dir "$kubelet" sandbox --crust "unix://$dir/crust.sock" "$@"; }
guest() { box exec demo /bin/sh -c "$1"; }

clean_up() {
	status=$?
	trap - EXIT INT TERM
	if [ "$status" != 0 ]; then
		printf '\n%sThe demo did not end well. The last lines of the logs:%s\n' "$bold" "$plain"
		tail -n 10 "$dir"/*.log "$dir"/run/demo/console 2>/dev/null || true
	fi
	box rm demo --run-dir "$dir/run" >/dev/null 2>&1 || true
	[ -e "$dir/run/demo/vm.json" ] && kill -9 "$(sed -n 's/.*"pid": \([0-9]*\).*/\1/p' "$dir/run/demo/vm.json")" 2>/dev/null || true
	for p in $server $driver; do kill "$p" 2>/dev/null && wait "$p" 2>/dev/null || true; done
	awk -v d="$dir/" 'index($5, d) == 1 { print $5 }' /proc/self/mountinfo | sort -r | while read -r m; do umount -l "$m" || true; done
	losetup -n -O NAME,BACK-FILE | awk -v d="$dir/" 'index($2, d) == 1 { print $1 }' | while read -r l; do losetup -d "$l" || true; done
	rm -rf --one-file-system "$dir"
	exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
note() { printf '%s%s%s\n' "$dim" "$*" "$plain"; }
step() {
	local begin what=$1
	begin=$(date +%s%N)
	shift
	"$@" >"$dir/out" 2>&1 || { cat "$dir/out"; return 1; }
	printf '  %-58s %8.1f ms\n' "$what" "$((($(date +%s%N) - begin) / 100000))e-1"
}

say "1. The node's CSI driver, and a CRUST server beside it"
bin/csi-node --endpoint "unix://$dir/csi.sock" --node-id demo --pool "demo=loop:$dir/pool" --state-dir "$dir/state" --kubelet-dir "$kubelet" >>"$dir/csi-node.log" 2>&1 &
driver=$!
bin/crustd --endpoint "unix://$dir/crust.sock" --backend qemu --state-dir "$dir/crust" --kubelet-dir "$kubelet" --allow-device '/dev/loop*' >>"$dir/crustd.log" 2>&1 &
server=$!
for _ in $(seq 1200); do ctl volume list >/dev/null 2>&1 && box list >/dev/null 2>&1 && break; sleep 0.05; done
step "create a volume with ext4" ctl volume create mine --size 512Mi --fs-type ext4
id=$(ctl volume list | awk '/mine/ { print $1 }')

say "2. A microVM with a kernel of its own"
step "boot it" box run demo --run-dir "$dir/run" --kernel .cache/guest/vmlinuz --initramfs .cache/guest/initramfs
note "  $(tail -n 1 "$dir/out" | cut -c1-150)"
sed -n 's/^crustctl: /  /p' "$dir/out" | fold -s -w 100
note "  this machine: Linux $(uname -r); the guest: Linux $(guest 'cat /proc/sys/kernel/osrelease')"

target=$kubelet/pods/pod/volumes/mount
say "3. The volume is left to the microVM"
step "format, defer, plug in, mount in the guest (fsGroup 2000)" box publish demo "$id" "$target" --group 2000
box list
path=$(guest 'ls -d /run/crust/volumes/*')
guest "echo 'written in the guest' > $path/hello; ls -la $path/hello" | sed 's/^/  /'

say "4. The two mount tables, side by side"
printf '  %-48s | %s\n' "on the host, of the target:" "in the guest:"
printf '  %-48s | %s\n' "$(awk -v t="$target" '$5 == t { print $(NF-2), $(NF-1), $6 }' /proc/self/mountinfo | cut -c1-48)" "$(guest "grep $path /proc/mounts" | cut -c1-80)"
dev=$(box list | awk '/demo/ { print $4 }')
printf '  %-48s | %s\n' "$dev in the host's table: $(grep -c " $dev " /proc/self/mountinfo || true) times" "$(guest "grep -c $path /proc/mounts") time"
if touch "$target/x" 2>/dev/null; then echo "  the host wrote to the target: that must not be" && exit 1; fi
note "  and the host can neither write there nor mount the device: $(mount "$dev" /mnt 2>&1 | head -1 | cut -c1-80)"

say "5. It grows while the guest writes"
guest "(while [ ! -e /tmp/stop ]; do date >> $path/log; done) >/dev/null 2>&1 &"
before=$(guest "df -m $path | tail -1 | awk '{print \$2}'" 2>/dev/null || guest "df -m $path | tail -1")
step "enlarge the device" ctl volume expand "$id" 1Gi
step "grow the file system in the guest" box expand demo "$id" "$target" 1Gi
guest 'touch /tmp/stop'
note "  the guest's df: $(guest "df -h $path | tail -1")"

say "6. Back to the host"
sum=$(guest "sync; sha256sum < $path/log" | cut -d' ' -f1)
step "unmount in the guest, unplug, unstage" box unpublish demo "$id" "$target"
step "end the microVM" box rm demo --run-dir "$dir/run"
note "  $(ctl volume publish "$id" "$target" 2>&1 | fold -s -w 100 | head -3)"
step "say that this machine's kernel may, and publish it here" ctl volume publish "$id" "$target" --attribute hostMayMount=true
note "  $(cat "$target/hello"); its log is $([ "$(sha256sum <"$target/log" | cut -d' ' -f1)" = "$sum" ] && echo 'the same, byte by byte' || echo DIFFERENT)"
[ "$(sha256sum <"$target/log" | cut -d' ' -f1)" = "$sum" ]
step "unpublish and delete" sh -c "bin/crustctl --endpoint unix://$dir/csi.sock --kubelet-dir $kubelet volume unpublish $id $target && bin/crustctl --endpoint unix://$dir/csi.sock --kubelet-dir $kubelet volume delete $id"
say "All gone: nothing is mounted, bound or running any more."
