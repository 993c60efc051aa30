// Package arch has no code, only tests that hold the project to its architecture:
// which package may import which, how long functions, files and packages may get,
// and a few habits (no init, every package says what it is for). docs/ARCHITECTURE.md
// says why; the linter's depguard rules are the same in short.
package arch
