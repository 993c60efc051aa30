package main

import (
	"context"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// betweenRepairs is how long the program is left alone after others broke its rules,
// so that it does not take them for an opponent.
const betweenRepairs = 11 * time.Second

// damage is what others do to the rules, in a shell on the node: SERVICE stands for a
// probe's address. Only for svcproxy in nftables mode.
var damage = map[string]string{
	"flush ruleset":    "nft flush ruleset",
	"table deleted":    "nft delete table ip svcproxy",
	"frontend deleted": "nft delete element ip svcproxy services '{ SERVICE . tcp . 80 }'",
	"endpoint deleted": "nft delete element ip svcproxy endpoints '{ SERVICE . tcp . 80 . 0 }'",
	"chain emptied":    "nft flush chain ip svcproxy to-services",
}

// repairs breaks the rules in each way, several times, and times how long it takes
// from the end of the command until the probe that is hit answers. The program may have
// begun before that.
func (p *plan) repairs(ctx context.Context, w *world, c *synthetic, pr *program, r *result) error {
	if p.damages == 0 {
		return nil
	}
	r.Repairs = map[string][]float64{}
	for _, what := range slices.Sorted(maps.Keys(damage)) {
		for i := range p.damages {
			if err := pause(ctx, pr, betweenRepairs); err != nil {
				return err
			}
			ms, err := p.timeRepair(ctx, w, c, pr, damage[what], i%probes)
			if err != nil {
				return fmt.Errorf("%s, the %d. time: %w", what, i+1, err)
			}
			r.Repairs[what] = append(r.Repairs[what], ms)
		}
	}
	return nil
}

func (p *plan) timeRepair(ctx context.Context, w *world, c *synthetic, pr *program, command string, k int) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	name := map[bool]string{false: "a", true: "b"}[c.atB[k]]
	run := exec.Command("sh", "-c", strings.ReplaceAll(command, "SERVICE", probeAddr(k)))
	var out strings.Builder
	run.Stdout, run.Stderr = &out, &out
	if err := w.node.Start(run); err != nil {
		return 0, err
	}
	if err := run.Wait(); err != nil {
		return 0, fmt.Errorf("%s: %w: %s", command, err, out.String())
	}
	begin := time.Now()
	// The node answers only some attempts that lead nowhere with ICMP.
	const patience = 10 * time.Millisecond
	if err := w.await(ctx, pr, probeAddr(k), name, patience); err != nil {
		return 0, err
	}
	return float64(time.Since(begin).Microseconds()) / 1000, nil
}

// repairTable lists the repairs: least, median, most.
func repairTable(results []result) string {
	var b strings.Builder
	for _, r := range results {
		for _, what := range slices.Sorted(maps.Keys(r.Repairs)) {
			if b.Len() == 0 {
				b.WriteString("\n| Services | program | broken by others | least, ms | median, ms | most, ms |\n|---|---|---|---|---|---|\n")
			}
			ms := r.Repairs[what]
			fmt.Fprintf(&b, "| %d | %s | %s | %s | %s | %s |\n", r.Services, r.Name, what,
				number(slices.Min(ms)), number(quantile(ms, 0.5)), number(slices.Max(ms)))
		}
	}
	return b.String()
}
