package linux

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_AARCH64

var refusedHere = []uintptr{unix.SYS_KEXEC_FILE_LOAD}
