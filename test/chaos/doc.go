// Package chaos breaks a running proxy in every way that a node sees, at random and
// repeatably, and looks in each quiet moment whether the kernel again does what the
// plan says, and whether a Service that nothing concerned went on answering. It is built
// with the tag chaos; "make chaos" runs it.
package chaos
