package hostfilter

import (
	"context"
	"os/exec"
	"strings"
	"testing"

	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
)

func run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// In both stores of a real host the filter is opened only where it is there, keeps its
// policies and rules, and is as before after clean-up.
func TestKernelHostFilter(t *testing.T) {
	t.Helper()
	nstest.Enter(t)
	ctx := context.Background()
	tables := &kernel.Tables{}
	t.Cleanup(func() { _ = tables.Close() })
	h := Host{Family: plan.IPv4, Tables: tables}
	open := func() {
		t.Helper()
		if err := Open(ctx, h, 0x4000); err != nil {
			t.Fatal(err)
		}
	}
	open()
	if there, err := h.Present(ctx); there || err != nil {
		t.Fatalf("a filter is there though nobody made one: %v", err)
	}
	for _, program := range []string{"iptables-nft", "iptables-legacy"} {
		run(t, program, "-P", "INPUT", "DROP")
		run(t, program, "-A", "FORWARD", "-i", "eth9", "-j", "DROP")
		before := run(t, program, "-S")
		if there, err := h.Present(ctx); !there || err != nil {
			t.Errorf("%s: the filter is not seen: %v", program, err)
		}
		open()
		once := run(t, program, "-S")
		for _, want := range []string{"-P INPUT DROP\n", "-A INPUT -j SVCPROXY-INPUT\n", "-A FORWARD -j SVCPROXY-FORWARD\n-A FORWARD -i eth9 -j DROP\n", "--mark 0x4000/0x4000 -j ACCEPT\n"} {
			if !strings.Contains(once, want) {
				t.Errorf("%s: want %q in\n%s", program, want, once)
			}
		}
		open()
		if twice := run(t, program, "-S"); twice != once {
			t.Errorf("%s: opened twice:\n%s\nonce:\n%s", program, twice, once)
		}
		run(t, program, "-F", "INPUT")
		open()
		if again := run(t, program, "-S"); again != once {
			t.Errorf("%s: after a flush:\n%s\nwant\n%s", program, again, once)
		}
		if err := Close(ctx, h); err != nil {
			t.Fatal(err)
		}
		if after := run(t, program, "-S"); after != before {
			t.Errorf("%s: after clean-up\n%s\nwant\n%s", program, after, before)
		}
	}
}
