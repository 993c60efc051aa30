package nft

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

// Fake is an nf_tables in memory. It holds what it is given, refuses what the kernel
// refuses, and lists the same. No packet passes through it, so dynamic sets have
// only the elements that are written.
type Fake struct {
	// Refuse, if set, is asked before each commit and may refuse it.
	Refuse func(ops []Op) error

	mu       sync.Mutex // guards all below
	tables   map[Table]*fakeTable
	commits  int
	watchers map[int]func(Event)
	next     int // watcher
}

type fakeTable struct {
	comment string
	chains  map[string]*fakeChain
	sets    map[string]*fakeSet
}

type fakeChain struct {
	Chain
	rules []*Rule
	uses  int // rules and elements that lead here
}

type fakeSet struct {
	Set
	elements map[elementKey]Element
	uses     int // rules that name it
}

type elementKey struct {
	key Tuple
	end bool
}

// Commits returns how many commits changed something.
func (k *Fake) Commits() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.commits
}

// Close implements Tables.
func (k *Fake) Close() error { return nil }

// Commit implements Tables.
func (k *Fake) Commit(ctx context.Context, ops []Op) error {
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
func (k *Fake) carryOut(ops []Op) ([]func(), error) {
	if k.tables == nil {
		k.tables = map[Table]*fakeTable{}
	}
	t := &fakeTransaction{fake: k}
	for i := range ops {
		if err := t.step(&ops[i]); err != nil {
			for _, undo := range slices.Backward(t.undo) {
				undo()
			}
			return nil, &Error{Op: &ops[i], Err: err}
		}
	}
	return t.undo, nil
}

// Disturb makes a commit as another program would: watchers are told.
func (k *Fake) Disturb(ops ...Op) error {
	k.mu.Lock()
	_, err := k.carryOut(ops)
	watchers := slices.Collect(maps.Values(k.watchers))
	k.mu.Unlock()
	if err != nil {
		return err
	}
	for _, f := range watchers {
		f(Event{Table: ops[0].Table, What: fmt.Sprintf("table %s: %s", ops[0].Table, ops[0].Kind)})
	}
	return nil
}

// Watch implements Tables.
func (k *Fake) Watch(ctx context.Context, ours func(Table) bool, ready chan<- struct{}, f func(Event)) error {
	k.mu.Lock()
	if k.watchers == nil {
		k.watchers = map[int]func(Event){}
	}
	id := k.next
	k.next++
	k.watchers[id] = func(e Event) {
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
func (k *Fake) Exists(ctx context.Context, t Table) (bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.tables[t] != nil, ctx.Err()
}

// Read implements Tables.
func (k *Fake) Read(ctx context.Context, name Table) (*Contents, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	t := k.tables[name]
	if t == nil {
		return nil, ErrNoTable
	}
	c := &Contents{Table: name, Comment: t.comment, Chains: map[string]*ChainContents{}, Sets: map[string]*Set{}, Elements: map[string][]Element{}}
	for n, ch := range t.chains {
		c.Chains[n] = &ChainContents{Chain: ch.Chain, Rules: slices.Clone(ch.rules)}
	}
	for n, s := range t.sets {
		set := s.Set
		c.Sets[n] = &set
		if !s.Dynamic {
			c.Elements[n] = slices.Collect(maps.Values(s.elements))
		}
	}
	return c, nil
}

// Elements implements Tables.
func (k *Fake) Elements(ctx context.Context, t Table, s *Set, f func(Element)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	k.mu.Lock()
	var all []Element
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

// fakeTransaction is a commit under way.
type fakeTransaction struct {
	fake *Fake
	undo []func()
}

func (t *fakeTransaction) step(o *Op) error {
	tables := t.fake.tables
	table := tables[o.Table]
	switch o.Kind {
	case AddTable:
		if table == nil {
			tables[o.Table] = &fakeTable{comment: cut(o.Comment), chains: map[string]*fakeChain{}, sets: map[string]*fakeSet{}}
			t.undo = append(t.undo, func() { delete(tables, o.Table) })
		}
		return nil
	case DeleteTable:
		if table == nil {
			return ErrNotExist
		}
		delete(tables, o.Table)
		t.undo = append(t.undo, func() { tables[o.Table] = table })
		return nil
	}
	if table == nil {
		return ErrNotExist
	}
	switch o.Kind {
	case AddChain:
		return t.addChain(table, o.Chain)
	case DeleteChain, FlushChain, AddRule:
		c := table.chains[o.Name]
		if c == nil {
			return ErrNotExist
		}
		switch o.Kind {
		case AddRule:
			return t.addRule(table, c, o.Rule)
		case DeleteChain:
			return t.deleteChain(table, c)
		}
		t.flushChain(table, c)
		return nil
	case AddSet:
		return t.addSet(table, o.Set)
	}
	name := o.Name
	if o.Set != nil {
		name = o.Set.Name
	}
	s := table.sets[name]
	if s == nil {
		return ErrNotExist
	}
	switch o.Kind {
	case DeleteSet:
		if s.uses > 0 {
			return ErrBusy
		}
		t.flushSet(table, s)
		delete(table.sets, name)
		t.undo = append(t.undo, func() { table.sets[name] = s })
	case FlushSet:
		t.flushSet(table, s)
	case AddElements, DeleteElements:
		for _, e := range o.Elements {
			if err := t.element(table, s, e, o.Kind == AddElements); err != nil {
				return err
			}
		}
	}
	return nil
}

// cut shortens a comment as messages do.
func cut(s string) string { return wire.CommentOf(wire.Comment(commentOfTable, s), commentOfTable) }

func (t *fakeTransaction) addChain(table *fakeTable, c *Chain) error {
	have := table.chains[c.Name]
	if have != nil {
		if (have.Hook == nil) != (c.Hook == nil) {
			return unix.EEXIST
		}
		return nil
	}
	n := &fakeChain{Chain: *c}
	n.Comment = cut(c.Comment)
	table.chains[c.Name] = n
	t.undo = append(t.undo, func() { delete(table.chains, c.Name) })
	return nil
}

func (t *fakeTransaction) deleteChain(table *fakeTable, c *fakeChain) error {
	if c.uses > 0 {
		return ErrBusy
	}
	t.flushChain(table, c)
	delete(table.chains, c.Name)
	t.undo = append(t.undo, func() { table.chains[c.Name] = c })
	return nil
}

// uses changes the count of users of something; undone with the rest.
func (t *fakeTransaction) uses(n *int, by int) {
	*n += by
	t.undo = append(t.undo, func() { *n -= by })
}

func (t *fakeTransaction) addRule(table *fakeTable, c *fakeChain, r *Rule) error {
	if err := t.refer(table, r, 1); err != nil {
		return err
	}
	have := c.rules
	kept := &Rule{Comment: cut(r.Comment), exprs: r.exprs, text: r.text}
	c.rules = append(slices.Clone(have), kept)
	t.undo = append(t.undo, func() { c.rules = have })
	return nil
}

func (t *fakeTransaction) flushChain(table *fakeTable, c *fakeChain) {
	have := c.rules
	for _, r := range have {
		_ = t.refer(table, r, -1) // all of it is there: it was when the rule came
	}
	c.rules = nil
	t.undo = append(t.undo, func() { c.rules = have })
}

// refer counts what a rule leads to.
func (t *fakeTransaction) refer(table *fakeTable, r *Rule, by int) error {
	for _, e := range r.exprs {
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
			return ErrNotExist
		}
		t.uses(&s.uses, by)
	}
	return nil
}

func (t *fakeTransaction) lead(table *fakeTable, v Verdict, by int) error {
	if v.Chain == "" {
		return nil
	}
	c := table.chains[v.Chain]
	if c == nil {
		return ErrNotExist
	}
	t.uses(&c.uses, by)
	return nil
}

func (t *fakeTransaction) addSet(table *fakeTable, s *Set) error {
	have := table.sets[s.Name]
	if have != nil {
		if !slices.Equal(have.Key, s.Key) || !slices.Equal(have.Data, s.Data) || have.flags() != s.flags() {
			return ErrExist
		}
		return nil
	}
	n := &fakeSet{Set: *s, elements: map[elementKey]Element{}}
	n.Comment = cut(s.Comment)
	table.sets[s.Name] = n
	t.undo = append(t.undo, func() { delete(table.sets, s.Name) })
	return nil
}

func (t *fakeTransaction) flushSet(table *fakeTable, s *fakeSet) {
	have := s.elements
	for _, e := range have {
		_ = t.lead(table, e.Verdict, -1)
	}
	s.elements = map[elementKey]Element{}
	t.undo = append(t.undo, func() { s.elements = have })
}

func (t *fakeTransaction) element(table *fakeTable, s *fakeSet, e Element, add bool) error {
	if len(e.Key) != tupleLen(s.Key) {
		return unix.EINVAL
	}
	key := elementKey{e.Key, e.End}
	have, exists := s.elements[key]
	if !add {
		if !exists {
			return ErrNotExist
		}
		delete(s.elements, key)
		t.undo = append(t.undo, func() { s.elements[key] = have })
		return t.lead(table, have.Verdict, -1)
	}
	if s.Verdicts && e.Verdict.Code == NoVerdict || len(s.Data) > 0 && len(e.Data) != tupleLen(s.Data) {
		return unix.EINVAL
	}
	if exists {
		if have.Data != e.Data || have.Verdict != e.Verdict {
			return ErrExist
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
func (k *Fake) String() string {
	k.mu.Lock()
	names := slices.SortedFunc(maps.Keys(k.tables), func(a, b Table) int { return strings.Compare(a.String(), b.String()) })
	k.mu.Unlock()
	var b strings.Builder
	for _, t := range names {
		if c, err := k.Read(context.Background(), t); err == nil {
			b.WriteString(c.String())
		}
	}
	return b.String()
}
