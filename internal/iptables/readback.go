package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// inKernel is what was found in the kernel besides our chains.
type inKernel struct {
	inForce   bool                         // a state of ours, or of a kube-proxy, forwards
	services  bool                         // KUBE-SERVICES of nat has rules
	missing   []jump                       // to be inserted
	surplus   map[sys.Table][]rule.Jumping // rules of built-in chains that lead to ours and should not
	pinned    map[rule.Chain]struct{}      // chains of ours to which others' rules lead
	endpoints int                          // chains of endpoints with rules
	commented int                          // of these, with comments
	compact   bool                         // endpoints need no chains, see settings
}

// newScan prepares to read a table.
func newScan(t sys.Table) *rule.Scan {
	return &rule.Scan{Table: t, Own: func(chain string) bool { return ours(t, chain) }}
}

// readBack learns from the kernel which chains of ours it has, and the jumps.
func (f *family) readBack(ctx context.Context) error {
	f.track.Forget()
	f.kernel = inKernel{surplus: map[sys.Table][]rule.Jumping{}, pinned: map[rule.Chain]struct{}{}}
	for _, t := range []sys.Table{sys.Filter, sys.NAT} {
		s := newScan(t)
		s.Each = func(c rule.Chain, text []byte) error {
			f.track.Have(c, f.hash.Sum(text))
			f.kernel.look(c, text)
			return nil
		}
		if err := s.Read(ctx, f.tables); err != nil {
			return fmt.Errorf("read back %s: %w", f.family, err)
		}
		f.kernel.take(s)
	}
	for c := range f.dirty {
		delete(f.dirty, c)
	}
	for id, sp := range f.services {
		for _, c := range f.r.service(sp).Chains {
			if f.track.Pending(c.Chain) {
				f.dirty[id] = struct{}{}
				break
			}
		}
	}
	f.known, f.fresh = true, true
	return nil
}

// look learns from a chain which layout is in force.
func (k *inKernel) look(c rule.Chain, text []byte) {
	k.services = k.services || c == rule.NAT(chainServices) && len(text) > 0
	k.compact = k.compact || c == rule.NAT(chainPostrouting) && bytes.Contains(text, []byte(" --bytecode "))
	if strings.HasPrefix(c.String(), prefixEndpoint) && len(text) > 0 {
		k.endpoints++
		if bytes.Contains(text, []byte(" --comment ")) {
			k.commented++
		}
	}
}

// take compares the jumps that a scan found with those that should be.
func (k *inKernel) take(s *rule.Scan) {
	found := slices.Clone(s.Jumps)
	for _, want := range jumps(s.Table) {
		at := slices.IndexFunc(found, func(h rule.Jumping) bool {
			return h == want.jumping() || h.From == want.from && rule.Normal(h.Rule) == rule.Normal(want.jumping().Rule)
		})
		if at < 0 {
			k.missing = append(k.missing, want)
			continue
		}
		k.inForce = k.inForce || k.services && want.table == sys.NAT && want.from == "PREROUTING"
		found = slices.Delete(found, at, at+1)
	}
	k.surplus[s.Table] = found
	for _, c := range s.Pinned {
		k.pinned[c] = struct{}{}
	}
}

// style says whether iptables-save prints rules just as they are rendered.
type style uint8

const (
	styleUnknown style = iota
	styleSame
	styleOther // the same rules in other words, as of another version
)

// checkStyle looks again at chains that are there with another text than wanted, in
// case only the words differ: then nothing is to be written.
func (f *family) checkStyle(ctx context.Context) {
	if f.style == styleSame {
		return
	}
	differ := map[rule.Chain]uint64{}
	for c := range f.track.Writes() {
		if _, exists := f.track.Exists(c); exists {
			differ[c] = 0
		}
	}
	if len(differ) == 0 {
		return
	}
	if err := f.normalSums(ctx, differ); err != nil {
		f.env.Log.Debug("could not look at the rules again", "family", f.family, "error", err)
		return // they are written then, which is harmless
	}
	equal := 0
	visit := func(r *rule.Set) {
		for _, c := range r.Chains {
			if have, ok := differ[c.Chain]; ok && have == f.hash.NormalSum(r.Text(c)) {
				f.track.Done(c.Chain)
				equal++
			}
		}
	}
	for _, sp := range f.dirtyServices() {
		visit(f.r.service(sp))
	}
	visit(f.r.common(f.each(nil), f.health))
	f.style = styleSame
	if equal > 0 {
		f.style = styleOther
	}
}

// normalSums fills in the sums of chains' normal forms, as the kernel has them.
func (f *family) normalSums(ctx context.Context, sums map[rule.Chain]uint64) error {
	var errs []error
	for _, t := range []sys.Table{sys.Filter, sys.NAT} {
		s := newScan(t)
		s.Each = func(c rule.Chain, text []byte) error {
			if _, ok := sums[c]; ok {
				sums[c] = f.hash.NormalSum(text)
			}
			return nil
		}
		errs = append(errs, s.Read(ctx, f.tables))
	}
	return errors.Join(errs...)
}

// verify returns what differs between the kernel and what it was last known to
// have, in a few words; "" if nothing does.
func (f *family) verify(ctx context.Context) (string, error) {
	seen := 0
	var wrong []string
	suspects := map[rule.Chain]uint64{}
	for _, t := range []sys.Table{sys.Filter, sys.NAT} {
		s := newScan(t)
		s.Each = func(c rule.Chain, text []byte) error {
			have, ok := f.track.Exists(c)
			switch {
			case !ok:
				wrong = append(wrong, fmt.Sprintf("chain %s of table %s appeared", c, c.Table()))
			case have != f.hash.Sum(text):
				suspects[c] = f.hash.NormalSum(text)
				seen++
			default:
				seen++
			}
			return nil
		}
		if err := s.Read(ctx, f.tables); err != nil {
			return "", err
		}
		var k inKernel
		k.surplus = map[sys.Table][]rule.Jumping{}
		k.pinned = map[rule.Chain]struct{}{}
		k.take(s)
		for _, j := range k.missing {
			wrong = append(wrong, fmt.Sprintf("the jump from %s to %s in table %s is gone", j.from, j.to, j.table))
		}
	}
	known := 0
	for range f.track.All() {
		known++
	}
	if known > seen {
		wrong = append(wrong, fmt.Sprintf("%d of %d chains are gone", known-seen, known))
	}
	if len(suspects) > 0 {
		if name := f.firstChanged(suspects); name != "" {
			wrong = append(wrong, name)
		}
	}
	if len(wrong) == 0 {
		return "", nil
	}
	const most = 3
	return f.family.String() + ": " + strings.Join(wrong[:min(len(wrong), most)], "; "), nil
}

// firstChanged names a chain among suspects whose rules differ in more than words.
func (f *family) firstChanged(suspects map[rule.Chain]uint64) string {
	check := func(r *rule.Set) {
		for _, c := range r.Chains {
			if have, ok := suspects[c.Chain]; ok && have == f.hash.NormalSum(r.Text(c)) {
				delete(suspects, c.Chain)
			}
		}
	}
	for _, sp := range f.services {
		check(f.r.service(sp))
	}
	check(f.r.common(f.each(nil), f.health))
	for c := range suspects {
		return fmt.Sprintf("the rules of chain %s in table %s were changed", c, c.Table())
	}
	return ""
}
