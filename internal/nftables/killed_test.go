package nftables

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"

	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
)

// startsAlone in the environment makes the test binary start the mode, with a plan of
// that many Services, and tell of each commit on its standard output.
const startsAlone = "SVCPROXY_TEST_START"

func TestMain(m *testing.M) {
	n := 0
	if _, err := fmt.Sscan(os.Getenv(startsAlone), &n); err == nil {
		b := newBackend(testEnv(plan.IPv4), &tellingTables{&kernel.Tables{}})
		if err := b.Apply(context.Background(), plan.Update{Plan: bigPlan(n, 4)}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// tellingTables writes a byte after each commit.
type tellingTables struct{ nft.Tables }

func (c *tellingTables) Commit(ctx context.Context, ops []nft.Op) error {
	err := c.Tables.Commit(ctx, ops)
	_, _ = os.Stdout.Write([]byte{'.'})
	return err
}

// A process that is killed at any moment of its start, several times, leaves what the
// next one completes to the state of a fresh start. What was in force stays in force
// until then.
func TestKernelKilledDuringTheStart(t *testing.T) {
	const services, kills = 3000, 5
	for name, old := range map[string]bool{"nothing before": false, "beside another layout": true} {
		t.Run(name, func(t *testing.T) {
			nstest.Enter(t)
			k := newKernel(t)
			before := owned.Tables(plan.IPv4)[0]
			if old {
				meddle(t, k, nft.Op{Kind: nft.AddTable, Table: before, Comment: "svcproxy, layout 0"},
					nft.Op{Kind: nft.AddChain, Table: before, Chain: &nft.Chain{Name: "prerouting", Hook: &nft.Hook{Type: "nat", Num: nft.Prerouting, Priority: -100}}})
			}
			rng := rand.New(rand.NewPCG(9, 9))
			for range kills {
				if startAndKill(t, services, 1+rng.IntN(3)) {
					t.Error("the start was over before the kill")
				}
				if c, err := k.ReadSome(context.Background(), before, func(*nft.Set) bool { return false }); old && (err != nil || !c.Hooked() || c.Comment != "svcproxy, layout 0") {
					t.Errorf("the table in force is not there any more: %v, %v", c, err)
				}
			}
			p := bigPlan(services, 4)
			mustApply(t, newBackend(testEnv(plan.IPv4), k), plan.Update{Plan: p})
			other := &fake.Tables{}
			mustApply(t, newBackend(testEnv(plan.IPv4), other), plan.Update{Plan: p})
			if have, want := state(t, k, plan.IPv4), state(t, other, plan.IPv4); have != want {
				t.Errorf("in the end: %s", plantest.FirstDifference(have, want))
			}
			if there, err := k.Exists(context.Background(), before); old && (there || err != nil) {
				t.Errorf("the table of before is there still: %v, %v", there, err)
			}
		})
	}
}

// startAndKill starts the mode as a process of its own in the namespace of the test and
// kills it behind a number of commits. It reports whether it had ended.
func startAndKill(t *testing.T, services, commits int) bool {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", startsAlone, services))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, told := io.ReadFull(out, make([]byte, commits))
	_ = cmd.Process.Kill()
	ended := cmd.Wait()
	if told != nil {
		t.Fatalf("it ends before its commit %d: %v", commits, ended)
	}
	return cmd.ProcessState.Success()
}
