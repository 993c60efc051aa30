//go:build faults

// Package fault is where a build for tests lets calls that change the kernel fail.
package fault

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Inject fails at random while the file that SVCPROXY_FAULTS names holds a share
// between 0 and 1.
func Inject() error {
	text, err := os.ReadFile(os.Getenv("SVCPROXY_FAULTS"))
	if err != nil {
		return nil
	}
	share, err := strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
	if err != nil || rand.Float64() >= share {
		return nil
	}
	return fmt.Errorf("injected fault: %w", unix.ENOBUFS)
}
