package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// inKernel is what was found in the kernel besides our chains.
type inKernel struct {
	inForce   bool                   // a state of ours, or of a kube-proxy, forwards
	missing   []jump                 // to be inserted
	surplus   map[sys.Table][]string // rules of built-in chains that lead to ours and should not
	pinned    map[chainID]struct{}   // chains of ours to which others' rules lead
	endpoints int                    // chains of endpoints with rules
	commented int                    // of these, with comments
}

// endpointsHaveComments reports whether what is in force has comments in its rules
// per endpoint.
func (f *family) endpointsHaveComments() bool { return f.kernel.commented > 0 }

// readBack learns from the kernel which chains of ours it has, and the jumps.
func (f *family) readBack(ctx context.Context) error {
	f.track.Forget()
	f.kernel = inKernel{surplus: map[sys.Table][]string{}, pinned: map[chainID]struct{}{}}
	for _, t := range []sys.Table{sys.Filter, sys.NAT} {
		s := newScan(t)
		s.chain = func(c chainID, text []byte) error {
			f.track.Have(c, f.hash.sum(text))
			if strings.HasPrefix(c.String(), prefixEndpoint) && len(text) > 0 {
				f.kernel.endpoints++
				if bytes.Contains(text, []byte(" --comment ")) {
					f.kernel.commented++
				}
			}
			return nil
		}
		if err := s.read(ctx, f.tables); err != nil {
			return fmt.Errorf("read back %s: %w", f.family, err)
		}
		f.kernel.take(s)
	}
	for c := range f.dirty {
		delete(f.dirty, c)
	}
	for id, sp := range f.services {
		for _, c := range f.r.service(sp).chains {
			if f.track.Pending(c.id) {
				f.dirty[id] = struct{}{}
				break
			}
		}
	}
	f.known, f.fresh = true, true
	return nil
}

// take compares the jumps that a scan found with those that should be.
func (k *inKernel) take(s *scan) {
	found := slices.Clone(s.jumps)
	for _, want := range jumps(s.table) {
		at := slices.IndexFunc(found, func(h foundJump) bool {
			return h.from == want.from && (h.rule == want.rule() || normal(h.rule) == normal(want.rule()))
		})
		if at < 0 {
			k.missing = append(k.missing, want)
			continue
		}
		if want.table == sys.NAT && want.from == "PREROUTING" {
			k.inForce = s.services
		}
		found = slices.Delete(found, at, at+1)
	}
	for _, h := range found {
		k.surplus[s.table] = append(k.surplus[s.table], h.from+" "+h.rule)
	}
	for _, c := range s.pinned {
		k.pinned[c] = struct{}{}
	}
}

// scan reads a table as iptables-save prints it.
type scan struct {
	table    sys.Table
	own      func(chain string) bool
	chain    func(c chainID, text []byte) error // is told each chain of ours with its rules
	jumps    []foundJump
	pinned   []chainID // chains of ours to which a rule in a chain of others leads
	services bool      // KUBE-SERVICES has rules

	declared map[string]bool // chains of ours; whether rules were seen
	current  string
	text     []byte
}

// foundJump is a rule of a built-in chain that leads to one of ours.
type foundJump struct{ from, rule string }

func newScan(t sys.Table) *scan {
	return &scan{table: t, own: func(chain string) bool { return ours(t, chain) }, declared: map[string]bool{}}
}

func (s *scan) read(ctx context.Context, tables sys.Tables) error {
	if err := tables.Save(ctx, s.table, s.line); err != nil {
		return err
	}
	if err := s.finish(); err != nil {
		return err
	}
	for name, filled := range s.declared {
		if !filled {
			if err := s.chain(inTable(s.table, name), nil); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *scan) line(line []byte) error {
	switch {
	case line[0] == ':':
		name, _, _ := strings.Cut(string(line[1:]), " ")
		if s.own(name) {
			s.declared[name] = false
		}
	case bytes.HasPrefix(line, []byte("-A ")):
		return s.rule(line)
	}
	return nil
}

func (s *scan) rule(line []byte) error {
	name, rest, _ := bytes.Cut(line[len("-A "):], []byte(" "))
	if string(name) != s.current {
		if err := s.finish(); err != nil {
			return err
		}
		s.current = string(name)
	}
	if _, own := s.declared[s.current]; own {
		s.text = append(append(s.text, line...), '\n')
		return nil
	}
	if !bytes.Contains(rest, []byte("KUBE-")) {
		return nil
	}
	target := targetOf(string(rest))
	if !s.own(target) {
		return nil
	}
	if slices.Contains(s.table.Builtin(), s.current) {
		s.jumps = append(s.jumps, foundJump{s.current, string(rest)})
	} else {
		s.pinned = append(s.pinned, inTable(s.table, target))
	}
	return nil
}

// finish hands over the chain read last.
func (s *scan) finish() error {
	if _, own := s.declared[s.current]; !own || len(s.text) == 0 {
		return nil
	}
	s.declared[s.current] = true
	s.services = s.services || s.current == chainServices
	err := s.chain(inTable(s.table, s.current), s.text)
	s.text, s.current = s.text[:0], ""
	return err
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
	differ := map[chainID]uint64{}
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
	visit := func(r *rules) {
		for _, c := range r.chains {
			if have, ok := differ[c.id]; ok && have == f.hash.sum([]byte(normalText(r.text(c)))) {
				f.track.Done(c.id)
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
func (f *family) normalSums(ctx context.Context, sums map[chainID]uint64) error {
	var errs []error
	for _, t := range []sys.Table{sys.Filter, sys.NAT} {
		s := newScan(t)
		s.chain = func(c chainID, text []byte) error {
			if _, ok := sums[c]; ok {
				sums[c] = f.hash.sum([]byte(normalText(text)))
			}
			return nil
		}
		errs = append(errs, s.read(ctx, f.tables))
	}
	return errors.Join(errs...)
}

// normalText is the normal form of a chain's lines.
func normalText(text []byte) string {
	var b strings.Builder
	for line := range bytes.Lines(text) {
		b.WriteString(normal(strings.TrimSuffix(string(line), "\n")))
		b.WriteByte('\n')
	}
	return b.String()
}

// verify returns what differs between the kernel and what it was last known to
// have, in a few words; "" if nothing does.
func (f *family) verify(ctx context.Context) (string, error) {
	seen := 0
	var wrong []string
	suspects := map[chainID]uint64{}
	for _, t := range []sys.Table{sys.Filter, sys.NAT} {
		s := newScan(t)
		s.chain = func(c chainID, text []byte) error {
			have, ok := f.track.Exists(c)
			switch {
			case !ok:
				wrong = append(wrong, fmt.Sprintf("chain %s of table %s appeared", c, c.table()))
			case have != f.hash.sum(text):
				suspects[c] = f.hash.sum([]byte(normalText(text)))
				seen++
			default:
				seen++
			}
			return nil
		}
		if err := s.read(ctx, f.tables); err != nil {
			return "", err
		}
		var k inKernel
		k.surplus = map[sys.Table][]string{}
		k.pinned = map[chainID]struct{}{}
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
func (f *family) firstChanged(suspects map[chainID]uint64) string {
	check := func(r *rules) {
		for _, c := range r.chains {
			if have, ok := suspects[c.id]; ok && have == f.hash.sum([]byte(normalText(r.text(c)))) {
				delete(suspects, c.id)
			}
		}
	}
	for _, sp := range f.services {
		check(f.r.service(sp))
	}
	check(f.r.common(f.each(nil), f.health))
	for c := range suspects {
		return fmt.Sprintf("the rules of chain %s in table %s were changed", c, c.table())
	}
	return ""
}
