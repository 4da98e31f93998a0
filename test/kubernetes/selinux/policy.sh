# In a guest, sourced by what starts a node there: the SELinux policy that pods need. "$1" is the project's directory.
# Debian's policy does not have the types that its lxc_contexts names, nor spc_t, which our manifests ask for.
cat >/etc/selinux/default/contexts/lxc_contexts <<'C'
process = "system_u:system_r:svirt_t:s0"
file = "system_u:object_r:svirt_image_t:s0"
ro_file = "system_u:object_r:svirt_image_t:s0"
C
dd if="$1/.cache/vm/container-policy" of=/sys/fs/selinux/load bs=16M status=none # the kernel wants it in one write
