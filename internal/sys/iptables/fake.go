package iptables

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Fake is Tables in memory: it understands the language of iptables-restore as
// far as chains, jumps and commits go, refuses what the kernel refuses about
// them, and prints itself like iptables-save. What a rule matches is not looked at.
type Fake struct {
	family Family
	store  Store

	mu       sync.Mutex // guards what follows
	tables   map[Table]*fakeTable
	refuse   func(t Table, rule string) error
	restores int
	inputs   []string
	suspect  []func(string)
}

// fakeTable holds the rules of each chain, without "-A CHAIN ".
type fakeTable struct{ chains map[string][]string }

// NewFake returns empty tables.
func NewFake(f Family, s Store) *Fake {
	return &Fake{family: f, store: s, tables: map[Table]*fakeTable{}}
}

func (f *Fake) Family() Family { return f.family }
func (f *Fake) Store() Store   { return f.store }

// Refuse makes every later Restore ask why not to take a rule, given as
// "CHAIN RULE" or, for the commit of the table as a whole, as "COMMIT". An error
// that is a *RestoreError is handed out as it is, with the line filled in if its
// Line is not negative. nil ends that.
func (f *Fake) Refuse(why func(t Table, rule string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuse = why
}

// Restores returns how many Restores were tried, and Inputs what they were given.
func (f *Fake) Restores() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.restores
}

// Inputs returns the inputs of all Restores since the last call.
func (f *Fake) Inputs() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.inputs
	f.inputs = nil
	return out
}

// Meddle carries out input as another program would: watchers hear of it.
func (f *Fake) Meddle(input string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.carryOut([]byte(input))
	for _, s := range f.suspect {
		s("somebody else wrote")
	}
	return err
}

func (f *Fake) Save(_ context.Context, t Table, line func([]byte) error) error {
	f.mu.Lock()
	text := f.print(t)
	f.mu.Unlock()
	return eachLine(bytes.NewReader(text), line)
}

// String prints all tables as iptables-save does.
func (f *Fake) String() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var b strings.Builder
	for _, t := range []Table{Mangle, Filter, NAT} {
		b.Write(f.print(t))
	}
	return b.String()
}

func (f *Fake) print(t Table) []byte {
	tab := f.tables[t]
	if tab == nil {
		return nil
	}
	var names []string
	for name := range tab.chains {
		if !slices.Contains(t.Builtin(), name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var b bytes.Buffer
	fmt.Fprintf(&b, "*%s\n", t)
	for _, name := range t.Builtin() {
		fmt.Fprintf(&b, ":%s ACCEPT [0:0]\n", name)
	}
	for _, name := range names {
		fmt.Fprintf(&b, ":%s - [0:0]\n", name)
	}
	for _, name := range append(t.Builtin(), names...) {
		for _, rule := range tab.chains[name] {
			fmt.Fprintf(&b, "-A %s %s\n", name, rule)
		}
	}
	b.WriteString("COMMIT\n")
	return b.Bytes()
}

func (f *Fake) Restore(ctx context.Context, input func(*bufio.Writer) error) error {
	var b bytes.Buffer
	w := bufio.NewWriter(&b)
	if err := errors.Join(input(w), w.Flush(), ctx.Err()); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.restores++
	f.inputs = append(f.inputs, b.String())
	return f.carryOut(b.Bytes())
}

// carryOut works on a copy of the table until its COMMIT.
func (f *Fake) carryOut(input []byte) error {
	var name Table
	var tab *fakeTable
	for i, line := range strings.Split(string(input), "\n") {
		var err error
		switch {
		case line == "" || line[0] == '#':
		case line[0] == '*':
			name = Table(line[1:])
			if name.Builtin() == nil {
				err = fmt.Errorf("no table %q", name)
			} else {
				tab = f.clone(name)
			}
		case tab == nil:
			err = errors.New("outside of a table")
		case line == "COMMIT":
			if err = f.ask(name, line); err == nil {
				f.tables[name], tab = tab, nil
			}
		default:
			err = f.command(name, tab, line)
		}
		if err != nil {
			return asRestoreError(err, i+1)
		}
	}
	if tab != nil {
		return &RestoreError{Err: errors.New("COMMIT expected")}
	}
	return nil
}

func asRestoreError(err error, line int) error {
	var re *RestoreError
	if !errors.As(err, &re) {
		return &RestoreError{Line: line, Err: err}
	}
	out := *re
	if out.Line >= 0 {
		out.Line = line
	} else {
		out.Line = 0
	}
	return &out
}

func (f *Fake) ask(t Table, rule string) error {
	if f.refuse == nil {
		return nil
	}
	return f.refuse(t, rule)
}

func (f *Fake) clone(t Table) *fakeTable {
	out := &fakeTable{chains: map[string][]string{}}
	for _, name := range t.Builtin() {
		out.chains[name] = nil
	}
	if old := f.tables[t]; old != nil {
		for name, rules := range old.chains {
			out.chains[name] = slices.Clone(rules)
		}
	}
	return out
}

// command carries out one line within a table.
func (f *Fake) command(name Table, t *fakeTable, line string) error {
	verb, rest, _ := strings.Cut(line, " ")
	chain, rule, _ := strings.Cut(rest, " ")
	if verb[0] == ':' {
		return t.declare(name, verb[1:])
	}
	if _, ok := t.chains[chain]; !ok {
		return fmt.Errorf("no chain %s", chain)
	}
	switch verb {
	case "-A", "-I":
		rule = strings.TrimPrefix(rule, "1 ")
		if err := f.ask(name, chain+" "+rule); err != nil {
			return err
		}
		if to := jumpOf(rule); to != "" && !isTarget(to) {
			if _, ok := t.chains[to]; !ok {
				return fmt.Errorf("no chain or target %s", to)
			}
		}
		if verb == "-I" {
			t.chains[chain] = slices.Insert(t.chains[chain], 0, rule)
		} else {
			t.chains[chain] = append(t.chains[chain], rule)
		}
	case "-D":
		at := slices.Index(t.chains[chain], rule)
		if at < 0 {
			return fmt.Errorf("no such rule in chain %s", chain)
		}
		t.chains[chain] = slices.Delete(t.chains[chain], at, at+1)
	case "-F":
		t.chains[chain] = nil
	case "-X":
		return t.remove(name, chain)
	default:
		return fmt.Errorf("unknown command %q", verb)
	}
	return nil
}

// declare is ":CHAIN": an own chain is created or flushed, a built-in one kept.
func (t *fakeTable) declare(name Table, chain string) error {
	const longest = 28
	if len(chain) > longest {
		return fmt.Errorf("chain name %s has more than %d characters", chain, longest)
	}
	if !slices.Contains(name.Builtin(), chain) {
		t.chains[chain] = nil
	}
	return nil
}

func (t *fakeTable) remove(name Table, chain string) error {
	if slices.Contains(name.Builtin(), chain) {
		return fmt.Errorf("chain %s is built in", chain)
	}
	if len(t.chains[chain]) > 0 {
		return fmt.Errorf("chain %s is not empty", chain)
	}
	for from, rules := range t.chains {
		for _, rule := range rules {
			if jumpOf(rule) == chain {
				return fmt.Errorf("chain %s is in use by chain %s", chain, from)
			}
		}
	}
	delete(t.chains, chain)
	return nil
}

// jumpOf returns the chain or target that a rule leads to.
func jumpOf(rule string) string {
	words := strings.Fields(rule)
	for i, w := range words {
		if (w == "-j" || w == "-g") && i+1 < len(words) {
			return words[i+1]
		}
	}
	return ""
}

// isTarget reports whether the name is one of iptables' own targets that are used
// here; anything else has to be a chain.
func isTarget(name string) bool {
	switch name {
	case "ACCEPT", "DROP", "RETURN", "REJECT", "DNAT", "SNAT", "MARK", "MASQUERADE", "REDIRECT", "LOG":
		return true
	}
	return false
}

func (f *Fake) Watch(ctx context.Context, _ func(string) bool, ready func(), suspect func(string)) error {
	f.mu.Lock()
	f.suspect = append(f.suspect, suspect)
	f.mu.Unlock()
	ready()
	<-ctx.Done()
	return ctx.Err()
}

// Watched reports whether somebody watches.
func (f *Fake) Watched() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.suspect) > 0
}
