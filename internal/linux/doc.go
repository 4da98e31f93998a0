// Package linux holds every raw system call of the project, each under the
// name of the call it makes. No other package may import golang.org/x/sys/unix
// or syscall (the linter enforces it).
//
// Descriptors are *os.File so that a forgotten one is closed by the garbage
// collector and a used-after-close one is an error instead of someone else's
// file. EINTR is retried here and nowhere else. Errors are *os.PathError or
// *os.SyscallError around the errno, so errors.Is(err, linux.EBUSY) works.
package linux
