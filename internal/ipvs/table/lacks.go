package table

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Lacks reports whether an error says that the kernel has no nf_tables, or not for
// the family.
func Lacks(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) ||
		errors.Is(err, unix.EINVAL)
}
