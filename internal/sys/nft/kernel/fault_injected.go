//go:build faults

package kernel

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// fault lets commits fail at random while the file that SVCPROXY_FAULTS names holds a
// share between 0 and 1. A build with the tag faults is for tests.
func fault() error {
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
