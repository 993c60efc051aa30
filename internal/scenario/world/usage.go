package world

import (
	"errors"
	"fmt"
)

// usageError is a fault of the script: it fails also where a command must fail.
type usageError struct{ message string }

func (e *usageError) Error() string { return e.message }

// Usagef returns an error in what the script says: one that fails also where a
// command must fail.
func Usagef(format string, args ...any) error {
	return &usageError{fmt.Sprintf(format, args...)}
}

// IsUsage reports whether an error is one of Usagef.
func IsUsage(err error) bool {
	var u *usageError
	return errors.As(err, &u)
}
