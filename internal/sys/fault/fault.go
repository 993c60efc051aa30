//go:build !faults

// Package fault is where a build for tests lets calls that change the kernel fail. It
// is built with the tag faults; without the tag nothing fails here.
package fault

// Inject returns the error that a call is to fail with, nil for none.
func Inject() error { return nil }
