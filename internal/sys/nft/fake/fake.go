// Package fake is an nf_tables in memory, for tests: it holds what it is given, refuses
// what the kernel refuses, and lists the same. A test compares the two. No packet passes
// through it; package walk does that with a listing.
package fake

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

// Tables is an nf_tables in memory; the zero value is empty. Dynamic sets have only
// the elements that are written.
type Tables struct {
	// Refuse, if set, is asked before each commit and may refuse it.
	Refuse func(ops []nft.Op) error

	mu        sync.Mutex // guards all below
	tables    map[nft.Table]*tableState
	commits   int
	disturbed uint32 // commits of Disturb
	watchers  map[int]func(nft.Event)
	next      int // watcher
}

type tableState struct {
	comment string
	chains  map[string]*chainState
	sets    map[string]*setState
}

type chainState struct {
	nft.Chain
	rules []*nft.Rule
	uses  int // rules and elements that lead here
}

type setState struct {
	nft.Set
	elements map[elementKey]nft.Element
	uses     int // rules that name it
}

type elementKey struct {
	key nft.Tuple
	end bool
}

// Commits returns how many commits changed something.
func (k *Tables) Commits() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.commits
}

// Close implements Tables.
func (k *Tables) Close() error { return nil }

// Commit implements Tables.
func (k *Tables) Commit(ctx context.Context, ops []nft.Op) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(ops) == 0 {
		return nil
	}
	if k.Refuse != nil {
		if err := k.Refuse(ops); err != nil {
			return err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, err := k.carryOut(ops); err != nil {
		return err
	}
	k.commits++
	return nil
}

// carryOut does all steps or none.
func (k *Tables) carryOut(ops []nft.Op) ([]func(), error) {
	if k.tables == nil {
		k.tables = map[nft.Table]*tableState{}
	}
	t := &transaction{tables: k}
	for i := range ops {
		if err := t.step(&ops[i]); err != nil {
			for _, undo := range slices.Backward(t.undo) {
				undo()
			}
			return nil, &nft.Error{Op: &ops[i], Err: err}
		}
	}
	return t.undo, nil
}

// Disturb makes a commit as another program would: watchers are told of its first step.
func (k *Tables) Disturb(ops ...nft.Op) error {
	k.mu.Lock()
	_, err := k.carryOut(ops)
	k.disturbed++
	watchers := slices.Collect(maps.Values(k.watchers))
	k.mu.Unlock()
	if err != nil {
		return err
	}
	e := nft.Event{Table: ops[0].Table, What: fmt.Sprintf("table %s: %s", ops[0].Table, ops[0].Kind)}
	switch o := &ops[0]; o.Kind {
	case nft.AddElements, nft.DeleteElements:
		e.Set = o.Set.Name
		for i := range o.Elements {
			e.Keys = append(e.Keys, o.Elements[i].Key)
		}
	case nft.AddRule, nft.FlushChain, nft.AddChain, nft.DeleteChain:
		e.Rules = true
	}
	for _, f := range watchers {
		f(e)
	}
	return nil
}

// Watched reports whether somebody watches.
func (k *Tables) Watched() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.watchers) > 0
}

// Others implements Tables.
func (k *Tables) Others(ctx context.Context) (uint32, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.disturbed, ctx.Err()
}

// Watch implements Tables.
func (k *Tables) Watch(ctx context.Context, ours func(nft.Table) bool, ready chan<- struct{}, f func(nft.Event)) error {
	k.mu.Lock()
	if k.watchers == nil {
		k.watchers = map[int]func(nft.Event){}
	}
	id := k.next
	k.next++
	k.watchers[id] = func(e nft.Event) {
		if ours(e.Table) {
			f(e)
		}
	}
	k.mu.Unlock()
	close(ready)
	<-ctx.Done()
	k.mu.Lock()
	delete(k.watchers, id)
	k.mu.Unlock()
	return ctx.Err()
}

// Exists implements Tables.
func (k *Tables) Exists(ctx context.Context, t nft.Table) (bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.tables[t] != nil, ctx.Err()
}

// Read implements Tables.
func (k *Tables) Read(ctx context.Context, name nft.Table) (*nft.Contents, error) {
	return k.ReadSome(ctx, name, func(*nft.Set) bool { return true })
}

// ReadSome implements Tables.
func (k *Tables) ReadSome(ctx context.Context, name nft.Table, want func(*nft.Set) bool) (*nft.Contents, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	t := k.tables[name]
	if t == nil {
		return nil, nft.ErrNoTable
	}
	c := &nft.Contents{Table: name, Comment: t.comment, Chains: map[string]*nft.ChainContents{}, Sets: map[string]*nft.Set{}, Elements: map[string][]nft.Element{}}
	for n, ch := range t.chains {
		c.Chains[n] = &nft.ChainContents{Chain: ch.Chain, Rules: slices.Clone(ch.rules)}
	}
	for n, s := range t.sets {
		set := s.Set
		c.Sets[n] = &set
		if !s.Dynamic && want(&s.Set) {
			c.Elements[n] = slices.Collect(maps.Values(s.elements))
		}
	}
	return c, nil
}

// Lookup implements Tables.
func (k *Tables) Lookup(ctx context.Context, t nft.Table, s *nft.Set, keys []nft.Tuple) ([]nft.Element, error) {
	var out []nft.Element
	err := k.Elements(ctx, t, s, func(e nft.Element) {
		if slices.Contains(keys, e.Key) {
			out = append(out, e)
		}
	})
	return out, err
}

// Elements implements Tables.
func (k *Tables) Elements(ctx context.Context, t nft.Table, s *nft.Set, f func(nft.Element)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	k.mu.Lock()
	var all []nft.Element
	if table := k.tables[t]; table != nil {
		if set := table.sets[s.Name]; set != nil {
			all = slices.Collect(maps.Values(set.elements))
		}
	}
	k.mu.Unlock()
	for _, e := range all {
		f(e)
	}
	return nil
}

// transaction is a commit under way.
type transaction struct {
	tables *Tables
	undo   []func()
}

func (t *transaction) step(o *nft.Op) error {
	tables := t.tables.tables
	table := tables[o.Table]
	switch o.Kind {
	case nft.AddTable:
		if table == nil {
			tables[o.Table] = &tableState{comment: cut(o.Comment), chains: map[string]*chainState{}, sets: map[string]*setState{}}
			t.undo = append(t.undo, func() { delete(tables, o.Table) })
		}
		return nil
	case nft.DeleteTable:
		if table == nil {
			return nft.ErrNotExist
		}
		delete(tables, o.Table)
		t.undo = append(t.undo, func() { tables[o.Table] = table })
		return nil
	}
	if table == nil {
		return nft.ErrNotExist
	}
	switch o.Kind {
	case nft.AddChain:
		return t.addChain(table, o.Chain)
	case nft.DeleteChain, nft.FlushChain, nft.AddRule:
		c := table.chains[o.Name]
		if c == nil {
			return nft.ErrNotExist
		}
		switch o.Kind {
		case nft.AddRule:
			return t.addRule(table, c, o.Rule)
		case nft.DeleteChain:
			return t.deleteChain(table, c)
		}
		t.flushChain(table, c)
		return nil
	case nft.AddSet:
		return t.addSet(table, o.Set)
	}
	name := o.Name
	if o.Set != nil {
		name = o.Set.Name
	}
	s := table.sets[name]
	if s == nil {
		return nft.ErrNotExist
	}
	switch o.Kind {
	case nft.DeleteSet:
		if s.uses > 0 {
			return nft.ErrBusy
		}
		t.flushSet(table, s)
		delete(table.sets, name)
		t.undo = append(t.undo, func() { table.sets[name] = s })
	case nft.FlushSet:
		t.flushSet(table, s)
	case nft.AddElements, nft.DeleteElements:
		for _, e := range o.Elements {
			if err := t.element(table, s, e, o.Kind == nft.AddElements); err != nil {
				return err
			}
		}
	}
	return nil
}

// cut shortens a comment as messages do.
func cut(s string) string {
	const typ = 0 // any
	return wire.CommentOf(wire.Comment(typ, s), typ)
}

func (t *transaction) addChain(table *tableState, c *nft.Chain) error {
	have := table.chains[c.Name]
	if have != nil {
		if (have.Hook == nil) != (c.Hook == nil) {
			return unix.EEXIST
		}
		return nil
	}
	n := &chainState{Chain: *c}
	n.Comment = cut(c.Comment)
	table.chains[c.Name] = n
	t.undo = append(t.undo, func() { delete(table.chains, c.Name) })
	return nil
}

func (t *transaction) deleteChain(table *tableState, c *chainState) error {
	if c.uses > 0 {
		return nft.ErrBusy
	}
	t.flushChain(table, c)
	delete(table.chains, c.Name)
	t.undo = append(t.undo, func() { table.chains[c.Name] = c })
	return nil
}

// uses changes the count of users of something; undone with the rest.
func (t *transaction) uses(n *int, by int) {
	*n += by
	t.undo = append(t.undo, func() { *n -= by })
}

func (t *transaction) addRule(table *tableState, c *chainState, r *nft.Rule) error {
	if err := t.refer(table, r, 1); err != nil {
		return err
	}
	have := c.rules
	kept := *r
	kept.Comment = cut(r.Comment)
	c.rules = append(slices.Clone(have), &kept)
	t.undo = append(t.undo, func() { c.rules = have })
	return nil
}

func (t *transaction) flushChain(table *tableState, c *chainState) {
	have := c.rules
	for _, r := range have {
		_ = t.refer(table, r, -1) // all of it is there: it was when the rule came
	}
	c.rules = nil
	t.undo = append(t.undo, func() { c.rules = have })
}

// refer counts what a rule leads to.
func (t *transaction) refer(table *tableState, r *nft.Rule, by int) error {
	for _, e := range r.Exprs() {
		set := ""
		switch e.Name {
		case "lookup":
			set = e.Str(unix.NFTA_LOOKUP_SET)
		case "dynset":
			set = e.Str(unix.NFTA_DYNSET_SET_NAME)
		case "immediate":
			v, _ := e.Find(unix.NFTA_IMMEDIATE_DATA)
			if err := t.lead(table, v.Verdict, by); err != nil {
				return err
			}
		}
		if set == "" {
			continue
		}
		s := table.sets[set]
		if s == nil {
			return nft.ErrNotExist
		}
		t.uses(&s.uses, by)
	}
	return nil
}

func (t *transaction) lead(table *tableState, v nft.Verdict, by int) error {
	if v.Chain == "" {
		return nil
	}
	c := table.chains[v.Chain]
	if c == nil {
		return nft.ErrNotExist
	}
	t.uses(&c.uses, by)
	return nil
}

func (t *transaction) addSet(table *tableState, s *nft.Set) error {
	have := table.sets[s.Name]
	if have != nil {
		if !slices.Equal(have.Key, s.Key) || !slices.Equal(have.Data, s.Data) || have.Verdicts != s.Verdicts || have.Interval != s.Interval || have.Dynamic != s.Dynamic {
			return nft.ErrExist
		}
		return nil
	}
	n := &setState{Set: *s, elements: map[elementKey]nft.Element{}}
	n.Comment = cut(s.Comment)
	table.sets[s.Name] = n
	t.undo = append(t.undo, func() { delete(table.sets, s.Name) })
	return nil
}

func (t *transaction) flushSet(table *tableState, s *setState) {
	have := s.elements
	for _, e := range have {
		_ = t.lead(table, e.Verdict, -1)
	}
	s.elements = map[elementKey]nft.Element{}
	t.undo = append(t.undo, func() { s.elements = have })
}

func (t *transaction) element(table *tableState, s *setState, e nft.Element, add bool) error {
	if len(e.Key) != s.KeyLen() {
		return unix.EINVAL
	}
	key := elementKey{e.Key, e.End}
	have, exists := s.elements[key]
	if !add {
		if !exists {
			return nft.ErrNotExist
		}
		delete(s.elements, key)
		t.undo = append(t.undo, func() { s.elements[key] = have })
		return t.lead(table, have.Verdict, -1)
	}
	if s.Verdicts && e.Verdict.Code == nft.NoVerdict || len(s.Data) > 0 && len(e.Data) != s.DataLen() {
		return unix.EINVAL
	}
	if exists {
		if have.Data != e.Data || have.Verdict != e.Verdict {
			return nft.ErrExist
		}
		return nil
	}
	if s.Size > 0 && len(s.elements) >= int(s.Size) {
		return unix.ENFILE
	}
	e.Comment = cut(e.Comment)
	s.elements[key] = e
	t.undo = append(t.undo, func() { delete(s.elements, key) })
	return t.lead(table, e.Verdict, 1)
}

// String lists all tables.
func (k *Tables) String() string {
	k.mu.Lock()
	names := slices.SortedFunc(maps.Keys(k.tables), func(a, b nft.Table) int { return strings.Compare(a.String(), b.String()) })
	k.mu.Unlock()
	var b strings.Builder
	for _, t := range names {
		if c, err := k.Read(context.Background(), t); err == nil {
			b.WriteString(c.String())
		}
	}
	return b.String()
}
