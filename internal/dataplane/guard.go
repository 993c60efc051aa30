package dataplane

import (
	"fmt"
	"runtime/debug"
)

// guard makes a panic of f an error: a fault in one mode must not take the plan
// and its pending changes with it.
func guard(doing string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &panicError{doing: doing, value: p, stack: string(debug.Stack())}
		}
	}()
	return f()
}

// panicError is a panic that guard caught.
type panicError struct {
	doing string
	value any
	stack string
}

func (e *panicError) Error() string { return fmt.Sprintf("%s: panic: %v", e.doing, e.value) }
