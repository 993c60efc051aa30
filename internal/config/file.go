package config

import (
	"fmt"
	"io"
	"os"
	"syscall"
)

// MaxFileSize is the size in bytes beyond which a configuration file is not read, that of
// the largest ConfigMap. What is decoded takes a hundred times as much memory at worst.
const MaxFileSize = 1 << 20

// ReadFile reads a configuration file. It takes a pipe too, such as a shell's <(...).
func ReadFile(name string) ([]byte, error) { return readFile(name, false) }

// readFile reads a file up to the limit; regular: and nothing that can be read only once,
// or for ever. It does not wait for a writer if there is none.
func readFile(name string, regular bool) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case info.IsDir():
		return nil, fmt.Errorf("%s is a directory: give the file in it", name)
	case regular && !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is no regular file, so that its changes cannot be followed", name)
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxFileSize+1))
	if err != nil {
		return nil, err
	}
	if len(data) > MaxFileSize {
		return nil, fmt.Errorf("%s is larger than %d bytes: give a file of settings alone", name, MaxFileSize)
	}
	return data, nil
}
