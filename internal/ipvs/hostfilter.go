package ipvs

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Packets to ip_vs pass the host's own input filter, and answers its forward filter,
// which in nf_tables no other table can overrule: where the host has iptables' table
// filter, two jumps in it let Service traffic through. Hosts without that table have
// nothing to open, and no program is executed there.

// Our chains in the host's table filter.
const (
	hostInput   = "SVCPROXY-INPUT"
	hostForward = "SVCPROXY-FORWARD"
)

// hostFilter is the host's table filter of one family.
type hostFilter interface {
	// present reports whether some store has the table, without executing anything.
	present(ctx context.Context) (bool, error)
	// legacy reports whether the legacy store has it.
	legacy() bool
	// stores are the places where it can be.
	stores(ctx context.Context) ([]iptables.Tables, error)
}

// hostTables are the running host's.
type hostTables struct {
	fam    plan.Family
	tables nft.Tables
}

func filterTable(f plan.Family) nft.Table {
	return nft.Table{Family: nftFamily(f), Name: string(iptables.Filter)}
}

func (h hostTables) finder() *iptables.Finder {
	return iptables.NewFinder(func(_ iptables.Table, chain string) bool { return chain == hostInput || chain == hostForward }, nil)
}

func (h hostTables) legacy() bool {
	return h.finder().HasLegacy(iptables.Family(h.fam), iptables.Filter)
}

func (h hostTables) present(ctx context.Context) (bool, error) {
	if h.legacy() {
		return true, nil
	}
	yes, err := h.tables.Exists(ctx, filterTable(h.fam))
	if lacks(err) {
		err = nil
	}
	return yes, err
}

func (h hostTables) stores(ctx context.Context) ([]iptables.Tables, error) {
	all, err := h.finder().All(ctx, iptables.Family(h.fam))
	if errors.Is(err, iptables.ErrUnsupported) {
		err = nil
	}
	return all, err
}

// hostRules are what table filter has of ours.
func hostRules(mark uint32) string {
	return fmt.Sprintf(`*filter
:%[1]s - [0:0]
:%[2]s - [0:0]
-A %[1]s -m comment --comment "Service traffic, see table svcproxy-ipvs" -m mark --mark %#[3]x/%#[3]x -j ACCEPT
-A %[2]s -m comment --comment "answers of Services" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-I INPUT 1 -j %[1]s
-I FORWARD 1 -j %[2]s
COMMIT
`, hostInput, hostForward, mark)
}

// openHost makes the host's table filter let Service traffic through, wherever it is.
func openHost(ctx context.Context, h hostFilter, mark uint32) error {
	if there, err := h.present(ctx); !there || err != nil {
		return err
	}
	stores, err := h.stores(ctx)
	if err != nil {
		return fmt.Errorf("look for the host's packet filter: %w", err)
	}
	var errs []error
	for _, t := range stores {
		state, err := readHost(ctx, t)
		if err == nil && state.table && !state.open() {
			input := state.removal() + hostRules(mark)
			err = t.Restore(ctx, func(w *bufio.Writer) error { _, err := w.WriteString(input); return err })
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("let Service traffic through the host's filter (%s): %w", t.Store(), err))
		}
	}
	return errors.Join(errs...)
}

// closeHost removes our rules from the host's table filter.
func closeHost(ctx context.Context, h hostFilter) error {
	if there, err := h.present(ctx); !there || err != nil {
		return err
	}
	stores, err := h.stores(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, t := range stores {
		state, err := readHost(ctx, t)
		if input := state.removal(); err == nil && input != "" {
			err = t.Restore(ctx, func(w *bufio.Writer) error { _, err := w.WriteString(input); return err })
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("remove our rules from the host's filter (%s): %w", t.Store(), err))
		}
	}
	return errors.Join(errs...)
}

// hostState is what a table filter has of ours.
type hostState struct {
	table  bool
	chains []string
	rules  int
	jumps  []string // "-A INPUT ...", as it is listed
}

func readHost(ctx context.Context, t iptables.Tables) (hostState, error) {
	var s hostState
	err := t.Save(ctx, iptables.Filter, func(line []byte) error {
		s.table = true
		l := string(line)
		name, _, _ := strings.Cut(strings.TrimPrefix(l, ":"), " ")
		switch {
		case strings.HasPrefix(l, ":") && (name == hostInput || name == hostForward):
			s.chains = append(s.chains, name)
		case strings.HasPrefix(l, "-A "+hostInput) || strings.HasPrefix(l, "-A "+hostForward):
			s.rules++
		case strings.HasSuffix(l, "-j "+hostInput) || strings.HasSuffix(l, "-j "+hostForward):
			s.jumps = append(s.jumps, l)
		}
		return nil
	})
	return s, err
}

// open reports whether everything is there.
func (s hostState) open() bool { return len(s.chains) == 2 && s.rules == 2 && len(s.jumps) == 2 }

// removal takes out what is there; "" if nothing is.
func (s hostState) removal() string {
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

// Of a legacy table nobody is told: whether it came is looked up every hostPause, and
// whether it is still as it should be every hostRecheck.
const (
	hostPause   = 2 * time.Second
	hostRecheck = time.Minute
)

// keepHostOpen lets Service traffic through the host's filter, now and whenever that
// changes, until ctx ends.
func (b *backend) keepHostOpen(ctx context.Context, ready chan struct{}) error {
	changed := make(chan struct{}, 1)
	watched := make(chan error, 1)
	isFilter := func(t nft.Table) bool { return t == filterTable(plan.IPv4) || t == filterTable(plan.IPv6) }
	go func() {
		watched <- b.k.tables.Watch(ctx, isFilter, ready, func(nft.Event) {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
	}()
	tick := time.NewTicker(hostPause)
	defer tick.Stop()
	had, looked, said := b.hostHasLegacy(), time.Now(), ""
	for due := true; ; {
		if due {
			looked = time.Now()
			b.openHosts(ctx, &said)
		}
		select {
		case err := <-watched:
			return err
		case <-changed:
			due = true
		case <-tick.C:
			has := b.hostHasLegacy()
			due = has && (!had || time.Since(looked) >= hostRecheck)
			had = has
		}
	}
}

// openHosts opens the filters of all families; said is the warning that was logged last.
func (b *backend) openHosts(ctx context.Context, said *string) {
	for _, f := range b.env.Families {
		if err := openHost(ctx, b.k.host(f), b.env.Mark()); err != nil && ctx.Err() == nil && err.Error() != *said {
			*said = err.Error()
			b.env.Log.Warn("the host's packet filter may keep Service traffic out", "family", f, "error", err)
		}
	}
}

func (b *backend) hostHasLegacy() bool {
	for _, f := range b.env.Families {
		if b.k.host(f).legacy() {
			return true
		}
	}
	return false
}
