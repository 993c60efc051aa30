// Package hostfilter lets Service traffic of ipvs mode through iptables' table filter,
// where the host has one.
//
// Packets to ip_vs pass the host's own input filter, and answers its forward filter,
// which in nf_tables no other table can overrule: two jumps in table filter accept by
// mark and by state. Hosts without that table have nothing to open, and no program is
// executed there.
package hostfilter

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Our chains in the host's table filter.
const (
	chainInput   = "SVCPROXY-INPUT"
	chainForward = "SVCPROXY-FORWARD"
)

// Filter is the host's table filter of one family.
type Filter interface {
	// Present reports whether some store has the table, without executing anything.
	Present(ctx context.Context) (bool, error)
	// Legacy reports whether the legacy store has it.
	Legacy() bool
	// Stores are the places where it can be.
	Stores(ctx context.Context) ([]iptables.Tables, error)
}

// Host are the running host's.
type Host struct {
	Family plan.Family
	Tables nft.Tables
}

// Table is the table filter in the store nft.
func Table(f plan.Family) nft.Table {
	return nft.Table{Family: table.FamilyOf(f), Name: string(iptables.Filter)}
}

func (h Host) finder() *iptables.Finder {
	return iptables.NewFinder(func(_ iptables.Table, chain string) bool { return chain == chainInput || chain == chainForward }, nil)
}

func (h Host) Legacy() bool {
	return h.finder().HasLegacy(iptables.Family(h.Family), iptables.Filter)
}

func (h Host) Present(ctx context.Context) (bool, error) {
	if h.Legacy() {
		return true, nil
	}
	yes, err := h.Tables.Exists(ctx, Table(h.Family))
	if nft.Lacks(err) {
		err = nil
	}
	return yes, err
}

func (h Host) Stores(ctx context.Context) ([]iptables.Tables, error) {
	all, err := h.finder().All(ctx, iptables.Family(h.Family))
	if errors.Is(err, iptables.ErrUnsupported) {
		err = nil
	}
	return all, err
}

// rules are what table filter has of ours.
func rules(mark uint32) string {
	return fmt.Sprintf(`*filter
:%[1]s - [0:0]
:%[2]s - [0:0]
-A %[1]s -m comment --comment "Service traffic, see table svcproxy-ipvs" -m mark --mark %#[3]x/%#[3]x -j ACCEPT
-A %[2]s -m comment --comment "answers of Services" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-I INPUT 1 -j %[1]s
-I FORWARD 1 -j %[2]s
COMMIT
`, chainInput, chainForward, mark)
}

// Open makes the host's table filter let Service traffic through, wherever it is.
func Open(ctx context.Context, h Filter, mark uint32) error {
	if there, err := h.Present(ctx); !there || err != nil {
		return err
	}
	stores, err := h.Stores(ctx)
	if err != nil {
		return fmt.Errorf("look for the host's packet filter: %w", err)
	}
	var errs []error
	for _, t := range stores {
		s, err := read(ctx, t)
		if err == nil && s.table && !s.open() {
			input := s.removal() + rules(mark)
			err = t.Restore(ctx, func(w *bufio.Writer) error { _, err := w.WriteString(input); return err })
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("let Service traffic through the host's filter (%s): %w", t.Store(), err))
		}
	}
	return errors.Join(errs...)
}

// Close removes our rules from the host's table filter.
func Close(ctx context.Context, h Filter) error {
	if there, err := h.Present(ctx); !there || err != nil {
		return err
	}
	stores, err := h.Stores(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, t := range stores {
		s, err := read(ctx, t)
		if input := s.removal(); err == nil && input != "" {
			err = t.Restore(ctx, func(w *bufio.Writer) error { _, err := w.WriteString(input); return err })
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("remove our rules from the host's filter (%s): %w", t.Store(), err))
		}
	}
	return errors.Join(errs...)
}

// state is what a table filter has of ours.
type state struct {
	table  bool
	chains []string
	rules  int
	jumps  []string // "-A INPUT ...", as it is listed
}

func read(ctx context.Context, t iptables.Tables) (state, error) {
	var s state
	err := t.Save(ctx, iptables.Filter, func(line []byte) error {
		s.table = true
		l := string(line)
		name, _, _ := strings.Cut(strings.TrimPrefix(l, ":"), " ")
		switch {
		case strings.HasPrefix(l, ":") && (name == chainInput || name == chainForward):
			s.chains = append(s.chains, name)
		case strings.HasPrefix(l, "-A "+chainInput) || strings.HasPrefix(l, "-A "+chainForward):
			s.rules++
		case strings.HasSuffix(l, "-j "+chainInput) || strings.HasSuffix(l, "-j "+chainForward):
			s.jumps = append(s.jumps, l)
		}
		return nil
	})
	return s, err
}

// open reports whether everything is there.
func (s state) open() bool { return len(s.chains) == 2 && s.rules == 2 && len(s.jumps) == 2 }

// removal takes out what is there; "" if nothing is.
func (s state) removal() string {
	if len(s.chains)+len(s.jumps) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("*filter\n")
	for _, j := range s.jumps {
		b.WriteString("-D" + strings.TrimPrefix(j, "-A") + "\n")
	}
	for _, c := range s.chains {
		b.WriteString("-F " + c + "\n-X " + c + "\n")
	}
	b.WriteString("COMMIT\n")
	return b.String()
}
