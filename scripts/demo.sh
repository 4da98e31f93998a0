#!/usr/bin/env bash
# Shows the main job on this machine: csi-node on a pool of loop files in a
# temporary directory, and a volume with each file system of this kernel, from creation to deletion.
# Leaves nothing behind, whatever happens.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/sbin:/sbin

dir=$(mktemp -d -t crust-demo.XXXXXX)
kubelet=$dir/kubelet
mkdir "$kubelet"
if [ -t 1 ]; then bold=$(tput bold) dim=$(tput dim) plain=$(tput sgr0); else bold='' dim='' plain=''; fi
driver=

start_driver() {
	bin/csi-node --endpoint "unix://$dir/csi.sock" --node-id demo --pool "demo=loop:$dir/pool" \
		--state-dir "$dir/state" --kubelet-dir "$kubelet" >>"$dir/log" 2>&1 &
	driver=$!
	for _ in $(seq 1200); do
		ctl doctor -o json 2>/dev/null | grep -A1 'driver at' | grep -q '"yes"' && return
		sleep 0.05
	done
	echo "the driver does not start:" && cat "$dir/log" && exit 1
}

# kill_driver waits for it too, so that what bash says of its end is not shown.
kill_driver() { kill -9 "$driver" && { wait "$driver" || true; }; }

ctl() { bin/crustctl --endpoint "unix://$dir/csi.sock" --kubelet-dir "$kubelet" "$@"; }

clean_up() {
	status=$?
	trap - EXIT INT TERM
	if [ "$status" != 0 ]; then
		printf '\n%sThe demo did not end well. The last lines of the log of the driver:%s\n' "$bold" "$plain"
		tail -n 20 "$dir/log" || true
	fi
	if [ -n "$driver" ]; then kill "$driver" 2>/dev/null && wait "$driver" 2>/dev/null || true; fi
	awk -v d="$dir/" 'index($5, d) == 1 { print $5 }' /proc/self/mountinfo | sort -r | while read -r m; do umount -l "$m" || true; done
	# Loop devices, and before them those that lie over them.
	losetup -n -O NAME,BACK-FILE | awk -v d="$dir/" 'index($2, d) == 1 { print $1 }' | while read -r l; do
		losetup -n -O NAME -j "$l" | while read -r upper; do losetup -d "$upper" || true; done
		losetup -d "$l" || true
	done
	rm -rf --one-file-system "$dir"
	exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

title() { printf '\n%s%s%s\n' "$bold" "$1" "$plain"; }

# step TEXT COMMAND...: runs it, and tells what was done and how long it took.
step() {
	local text=$1 begin end
	shift
	begin=$(date +%s%N)
	if ! "$@" >"$dir/out" 2>&1; then
		printf '  %-58s FAILED\n' "$text"
		cat "$dir/out"
		return 1
	fi
	end=$(date +%s%N)
	printf '  %-58s %s%6d.%01d ms%s\n' "$text" "$dim" $(((end - begin) / 1000000)) $((((end - begin) / 100000) % 10)) "$plain"
}
note() { printf '  %s%s%s\n' "$dim" "$1" "$plain"; }
json() { sed -nE "s/.*\"$1\": \"([^\"]+)\".*/\\1/p" "$dir/out" | head -n 1; }
same() { cmp -s "$1" "$2" || { echo "$1 and $2 differ"; return 1; }; }

unpublish_all() {
	ctl volume unpublish "$1" "$2/reader" --keep-staged
	ctl volume unpublish "$1" "$2/mount"
	ctl volume unpublish "$3" "$2/restored"
}

printf '%sCrust CSI: from a volume claim to real bytes, on this machine%s\n' "$bold" "$plain"
note "kernel $(uname -r); a pool of loop files in $dir/pool; no cluster, no hypervisor"
head -c 4194304 /dev/urandom >"$dir/bytes"

title "The driver starts, and looks at the kernel"
step "start csi-node" start_driver
ctl doctor | awk -F'   *' 'NR > 1 && $2 !~ /^yes/ { printf "  %s: %s\n", $1, $2; if ($3 != "") printf "      %s\n", $3 }'

names=$(go run ./deploy/filesystems names)
for fs in $names; do
	grep -qw "$fs" /proc/filesystems || { note "this kernel has no $fs" && continue; }
	pod=$kubelet/pods/$fs
	title "A volume with $fs"
	step "create, 512 MiB" ctl volume create "data-$fs" --size 512Mi --fs-type "$fs" -o json
	id=$(json volume_id)
	step "attach, format, publish read-write" ctl volume publish "$id" "$pod/mount" --fs-type "$fs"
	step "write 4 MiB of random bytes" cp "$dir/bytes" "$pod/mount/bytes"
	step "publish once more, read-only, beside it" ctl volume publish "$id" "$pod/reader" --fs-type "$fs" --read-only
	if touch "$pod/reader/x" 2>/dev/null; then echo "a read-only publish took a write" && exit 1; fi
	note "the second one refuses a write, the first goes on"
	step "snapshot, with the file system frozen" ctl volume snapshot "$id" "snap-$fs" -o json
	snap=$(json snapshot_id)
	step "overwrite the file" sh -c "echo changed >'$pod/mount/bytes'"
	step "restore the snapshot to a volume of 768 MiB" ctl volume create "restored-$fs" --size 768Mi --fs-type "$fs" --from-snapshot "$snap" -o json
	restored=$(json volume_id)
	step "publish it beside its origin; it is grown first" ctl volume publish "$restored" "$pod/restored" --fs-type "$fs"
	step "its bytes are those of before the overwrite" same "$pod/restored/bytes" "$dir/bytes"
	note "$(df -h --output=size,avail "$pod/restored" | tail -n 1 | awk '{ print "it has " $1 ", of which " $2 " are free" }')"
	if step "expand the first to 1 GiB while it is published" ctl volume expand "$id" 1Gi --path "$pod/mount" >"$dir/step" 2>&1; then
		cat "$dir/step"
	elif grep -q CAP_SYS_RESOURCE "$dir/step"; then
		note "expand while published: refused, this root lacks CAP_SYS_RESOURCE, which ext4 asks"
		note "for; the driver says so, and grows the volume when it is next staged"
	elif grep -q "only while it is not mounted" "$dir/step"; then
		note "expand while published: refused, no kernel grows a mounted $fs; the driver says so, and"
		note "grows the volume when it is next staged"
	else
		cat "$dir/step" && exit 1
	fi
	step "kill -9 the driver, start it again" kill_driver
	step "it comes back" start_driver
	step "the pod's mount never noticed" test "$(cat "$pod/mount/bytes")" = changed
	step "publish again: nothing to do, and it knows that" ctl volume publish "$id" "$pod/mount" --fs-type "$fs"
	step "unpublish and unstage everything" unpublish_all "$id" "$pod" "$restored"
	step "stage and publish anew: grown, and the bytes are there" ctl volume publish "$id" "$pod/mount" --fs-type "$fs"
	step "read them back" test "$(cat "$pod/mount/bytes")" = changed
	note "$(df -h --output=size "$pod/mount" | tail -n 1 | awk '{ print "it has " $1 " now" }')"
	ctl volume unpublish "$id" "$pod/mount" >/dev/null
	step "delete both volumes and the snapshot" sh -c "bin/crustctl --endpoint unix://$dir/csi.sock volume delete $id && bin/crustctl --endpoint unix://$dir/csi.sock volume delete $restored && bin/crustctl --endpoint unix://$dir/csi.sock volume delete $snap"
done

title "Two pods with different fsGroups, one volume, at once"
pod=$kubelet/pods/groups
idmap=(--access-mode SINGLE_NODE_MULTI_WRITER --attribute fsGroupStrategy=idmap)
step "create, 512 MiB" ctl volume create shared --size 512Mi --access-mode SINGLE_NODE_MULTI_WRITER -o json
id=$(json volume_id)
step "publish for a pod with fsGroup 3000: normalised once" ctl volume publish "$id" "$pod/a" --group 3000 "${idmap[@]}"
many() { mkdir "$1/many" && (cd "$1/many" && seq 20000 | xargs touch); }
step "it writes 20,000 files" many "$pod/a"
step "publish for a pod with fsGroup 4000, by an id map" ctl volume publish "$id" "$pod/b" --group 4000 "${idmap[@]}"
note "the first pod sees its files as $(stat -c 'group %g' "$pod/a/many/7"), the second as $(stat -c 'group %g' "$pod/b/many/7")"
note "$(ctl volume show "$pod/b" | sed -n 's/^recorded ownership  */on the disk: /p'); no file was touched for the second pod"
step "unpublish the second" ctl volume unpublish "$id" "$pod/b" --keep-staged
step "unpublish the first" ctl volume unpublish "$id" "$pod/a"
step "by chown instead: a walk gives all of them to 5000" ctl volume publish "$id" "$pod/a" --group 5000
ctl volume unpublish "$id" "$pod/a" >/dev/null
step "again with the same group: a record answers, no walk" ctl volume publish "$id" "$pod/a" --group 5000
ctl volume unpublish "$id" "$pod/a" >/dev/null
step "delete it" ctl volume delete "$id"

title "A raw block volume"
pod=$kubelet/pods/block
step "create, 256 MiB" ctl volume create data-block --size 256Mi --block -o json
id=$(json volume_id)
step "publish the device" ctl volume publish "$id" "$pod/device" --block
step "write 4 MiB to it" dd if="$dir/bytes" of="$pod/device" bs=1M conv=notrunc,fsync
step "publish it read-only too: a second, read-only device" ctl volume publish "$id" "$pod/reader" --block --read-only
if dd if=/dev/zero of="$pod/reader" bs=4k count=1 conv=notrunc,fsync 2>/dev/null; then echo "a read-only device took a write" && exit 1; fi
note "root cannot write through it: $(lsblk -dno NAME,RO "$(readlink -f "/dev/block/$(stat -c %Hr:%Lr "$pod/reader")" 2>/dev/null || echo "$pod/reader")" 2>/dev/null | awk '{ print $1 " ro=" $2 }')"
step "read the bytes back through it" cmp -n 4194304 "$dir/bytes" "$pod/reader"
ctl volume unpublish "$id" "$pod/device" --keep-staged >/dev/null
step "clone it, now that nobody writes to it" ctl volume clone "$id" clone-block --block -o json
clone=$(json volume_id)
step "publish the clone" ctl volume publish "$clone" "$pod/clone" --block
step "it has the same bytes" cmp -n 4194304 "$dir/bytes" "$pod/clone"
ctl volume unpublish "$id" "$pod/reader" >/dev/null
ctl volume unpublish "$clone" "$pod/clone" >/dev/null
step "delete both" sh -c "bin/crustctl --endpoint unix://$dir/csi.sock volume delete $id && bin/crustctl --endpoint unix://$dir/csi.sock volume delete $clone"

title "What is left"
step "stop the driver" kill "$driver"
wait "$driver" 2>/dev/null || true
driver=
left=$(find "$dir/pool" "$kubelet" -type f ! -name lock ! -name reserve ! -name pool.json; awk -v d="$dir/" 'index($5, d) == 1' /proc/self/mountinfo; losetup -n -O BACK-FILE | grep -F "$dir/" || true)
if [ -n "$left" ]; then echo "$left" && exit 1; fi
note "no volume, no mount, no loop device"
