package app

import (
	"context"
	"log/slog"
	"os"
	"runtime/debug"
	"strconv"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/sys/conntrack"
	"github.com/svcproxy/svcproxy/internal/sys/host"
)

// setUpKernel applies the connection tracking settings, logs what could not be set
// and returns it. The proxy works without.
func setUpKernel(h host.Sysctls, c config.Conntrack, log *slog.Logger) []string {
	var out []string
	for _, w := range conntrack.Setup(h, conntrack.Sizing{
		MaxPerCore: c.MaxPerCore, Min: c.Min,
		TCPEstablished: c.TCPEstablished, TCPCloseWait: c.TCPCloseWait,
		UDP: c.UDP, UDPStream: c.UDPStream,
		BeLiberal: c.TCPBeLiberal,
	}) {
		log.Warn("a kernel setting could not be made", "err", w)
		out = append(out, w.Error())
	}
	return out
}

// How much the heap grows, in percent of what is in use, before it is collected. At
// the start most of it is new, and collecting would take a third of the time. Later,
// facts and plans live long, so that collecting often costs little.
const (
	gcPercentAtStart = 200
	gcPercent        = 50
)

// setUpProcess makes the process unlikely to be killed when memory is short.
func setUpProcess(c *config.Config, getenv func(string) string, log *slog.Logger) {
	setOOMScore(c.OOMScoreAdj, log)
	if getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercentAtStart)
	}
}

// settle makes the process modest in its use of memory once it has started, unless
// the environment said how much it may use.
func settle(getenv func(string) string) {
	if getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	// Reading and planning everything took memory that is not needed again.
	go debug.FreeOSMemory()
}

func setOOMScore(value int, log *slog.Logger) {
	const file = "/proc/self/oom_score_adj"
	if err := os.WriteFile(file, []byte(strconv.Itoa(value)), 0); err != nil {
		log.Log(context.Background(), slog.Level(-2), "the score for the out-of-memory killer stays as it is", "err", err)
	}
}
