package nft

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inNamespace makes the test run in a network namespace of its own.
func inNamespace(t *testing.T) *Kernel {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to make a network namespace")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	k := &Kernel{}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	return k
}

// everySet has a set of each kind.
func everySet(f Family) []*Set {
	addr := AddrType(f)
	return []*Set{
		{Name: "addresses", Key: []Type{addr}, Comment: "plain"},
		{Name: "ranges", Key: []Type{addr}, Interval: true},
		{Name: "verdicts", Key: []Type{addr, TypeProto, TypePort}, Verdicts: true},
		{Name: "ports", Key: []Type{TypePort}, Verdicts: true},
		{Name: "slots", Key: []Type{addr, TypeProto, TypePort, TypeNumber}, Data: []Type{addr, TypePort}},
		{Name: "pairs", Key: []Type{addr, addr, TypeProto, TypePort}},
		{Name: "clients", Key: []Type{addr}, Data: []Type{addr, TypePort}, Dynamic: true, Size: 64, Comment: "of a Service"},
	}
}

// everyRule has a rule of each statement.
func everyRule(f Family) []*Rule {
	rule := func(s ...Statement) *Rule { return NewRule(f, s...) }
	tcp := Is{Field: Proto, Value: Tuple("\x06")}
	return []*Rule{
		rule(tcp, Reject{Reset: true}),
		rule(Reject{}),
		rule(In{Fields: []Field{SrcAddr}, Set: "ranges"}, SetMark(1<<14), Do{Code: Goto, Chain: "target"}),
		rule(In{Fields: []Field{SrcAddr, DstAddr, Proto, DstPort}, Set: "pairs", Not: true}, ClearMark(1<<14), Do{Code: Jump, Chain: "target"}),
		rule(InterfaceIs{Name: "cni0"}, Do{Code: Return}),
		rule(InterfaceIs{Name: "vx", Prefix: true, Not: true}, Has{Field: Mark, Bits: 1 << 3}, Do{Code: Accept}),
		rule(SrcIsLocal{}, tcp, DNAT{Fields: []Field{SrcAddr}, Map: "clients"}),
		rule(DNAT{Fields: []Field{DstAddr, Proto, DstPort}, Slots: 3, Map: "slots"}),
		rule(DNAT{Fields: []Field{DstAddr, Proto, DstPort}, Slots: 300, First: 1 << 20, Map: "slots"}),
		rule(Dispatch{Fields: []Field{DstAddr, Proto, DstPort}, Map: "verdicts"}),
		rule(Has{Field: State, Bits: StateNew}, Has{Field: Status, Bits: StatusDNAT}, tcp,
			In{Fields: []Field{OrigDstAddr}, Set: "addresses"}, Dispatch{Fields: []Field{OrigDstPort}, Map: "ports"}),
		rule(Remember{Map: "clients", Key: []Field{SrcAddr}, Data: []Field{DstAddr, DstPort}, Timeout: 3 * time.Hour}),
		{Comment: "drops all", exprs: rule(Do{Code: Drop}).exprs, text: rule(Do{Code: Drop}).text},
	}
}

// steps are a random transaction: mostly sensible, sometimes refused.
func steps(rng *rand.Rand, t Table) []Op {
	sets, rules := everySet(t.Family), everyRule(t.Family)
	addr := func() netip.Addr {
		a := netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(12))})
		if t.Family == IPv6 {
			a = netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: byte(rng.IntN(12))})
		}
		return a
	}
	elements := func(s *Set) []Element {
		var out []Element
		for range 1 + rng.IntN(4) {
			c := Concat(nil)
			e := Element{Comment: []string{"", "default/web:http"}[rng.IntN(2)]}
			for _, typ := range s.Key {
				switch typ {
				case TypeProto:
					c = c.Proto(6)
				case TypePort:
					c = c.Port(uint16(80 + rng.IntN(3)))
				case TypeNumber:
					c = c.Number(uint32(rng.IntN(3)))
				default:
					c = c.Addr(addr())
				}
			}
			e.Key = c.Tuple()
			if len(s.Key) == 1 && s.Key[0] == TypePort {
				e.Key = PortTuple(uint16(80 + rng.IntN(3)))
			}
			switch {
			case s.Verdicts:
				e.Verdict = []Verdict{{Code: Drop}, {Code: Goto, Chain: "target"}}[rng.IntN(2)]
			case len(s.Data) > 0:
				e.Data = Concat(nil).Addr(addr()).Port(8080).Tuple()
			}
			if s.Dynamic {
				e.Timeout = time.Hour
			}
			out = append(out, e)
		}
		return out
	}
	var ops []Op
	for range 1 + rng.IntN(4) {
		s := sets[rng.IntN(len(sets))]
		chain := []string{"target", "other", "third"}[rng.IntN(3)]
		o := [...]Op{
			{Kind: AddSet, Set: s}, {Kind: DeleteSet, Name: s.Name}, {Kind: FlushSet, Name: s.Name},
			{Kind: AddElements, Set: s}, {Kind: AddElements, Set: s}, {Kind: DeleteElements, Set: s},
			{Kind: AddChain, Chain: &Chain{Name: chain, Comment: "for " + chain}}, {Kind: DeleteChain, Name: chain}, {Kind: FlushChain, Name: chain},
			{Kind: AddRule, Name: chain, Rule: rules[rng.IntN(len(rules))]},
		}[rng.IntN(10)]
		if o.Kind == AddElements || o.Kind == DeleteElements {
			o.Elements = elements(s)
			if s.Interval { // whole ranges only
				o.Kind = AddElements
				p := netip.PrefixFrom(addr(), addr().BitLen()-2).Masked()
				o.Elements = Intervals([]netip.Prefix{p})
			}
		}
		ops = append(ops, o)
	}
	if rng.IntN(60) == 0 {
		ops = append(ops, Op{Kind: DeleteTable}, Op{Kind: AddTable, Comment: "again"})
	}
	for i := range ops {
		ops[i].Table = t
	}
	return ops
}

// honestSteps is how many transactions the fake and the kernel are compared for.
const honestSteps = 600

// The fake and the kernel take the same transactions, refuse the same and list the
// same.
func TestFakeIsHonest(t *testing.T) {
	for _, f := range []Family{IPv4, IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			k, fake := inNamespace(t), &Fake{}
			ctx := context.Background()
			table := Table{f, "honest"}
			rng := rand.New(rand.NewPCG(5, uint64(f)))
			start := []Op{{Kind: AddTable, Table: table, Comment: "of a test"}}
			for _, s := range everySet(f) {
				start = append(start, Op{Kind: AddSet, Table: table, Set: s})
			}
			refused := 0
			for step := range honestSteps {
				ops := start
				if step > 0 {
					ops = steps(rng, table)
				}
				kerr, ferr := k.Commit(ctx, ops), fake.Commit(ctx, ops)
				if ebusy := errors.Is(kerr, ErrBusy) && ferr == nil; ebusy {
					t.Skipf("needs Linux 6.2, which lets go of chains in the same transaction (step %d)", step)
				}
				if (kerr == nil) != (ferr == nil) {
					t.Fatalf("step %d: %v: the kernel says %v, the fake %v\n%s", step, text(ops), kerr, ferr, fake)
				}
				if kerr != nil {
					refused++
					a, aok := errors.AsType[*Error](kerr)
					b, bok := errors.AsType[*Error](ferr)
					if !aok || !bok || a.Op == nil || b.Op == nil || a.Op.Kind != b.Op.Kind {
						t.Fatalf("step %d: %v: the kernel says %v, the fake %v", step, text(ops), kerr, ferr)
					}
				}
				have, err := k.Read(ctx, table)
				if err != nil {
					t.Fatal(err)
				}
				want, err := fake.Read(ctx, table)
				if err != nil {
					t.Fatal(err)
				}
				if have.String() != want.String() {
					t.Fatalf("step %d: %v: the kernel has\n%s\nthe fake\n%s", step, text(ops), have, want)
				}
			}
			if refused == 0 || refused == honestSteps {
				t.Errorf("%d of %d transactions are refused: that tests little", refused, honestSteps)
			}
			out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
			if err != nil || !strings.Contains(string(out), "table "+table.String()) {
				t.Errorf("nft list ruleset: %v\n%s", err, out)
			}
		})
	}
}

func text(ops []Op) []string {
	var out []string
	for i := range ops {
		s := ops[i].String()
		if ops[i].Rule != nil {
			s += " " + ops[i].Rule.String()
		}
		for j := range ops[i].Elements {
			s += " " + ops[i].Set.ElementText(&ops[i].Elements[j])
		}
		out = append(out, s)
	}
	return out
}

// Every statement comes back from the kernel as it was written, and nft lists it.
func TestRulesComeBack(t *testing.T) {
	for _, f := range []Family{IPv4, IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			k := inNamespace(t)
			ctx := context.Background()
			table := Table{f, "rules"}
			ops := []Op{{Kind: AddTable}, {Kind: AddChain, Chain: &Chain{Name: "target"}}, {Kind: AddChain, Chain: &Chain{Name: "all"}}}
			for _, s := range everySet(f) {
				ops = append(ops, Op{Kind: AddSet, Set: s})
			}
			for _, r := range everyRule(f) {
				ops = append(ops, Op{Kind: AddRule, Name: "all", Rule: r})
			}
			for i := range ops {
				ops[i].Table = table
			}
			if err := k.Commit(ctx, ops); err != nil {
				t.Fatal(err)
			}
			c, err := k.Read(ctx, table)
			if err != nil {
				t.Fatal(err)
			}
			want := everyRule(f)
			if len(c.Chains["all"].Rules) != len(want) {
				t.Fatalf("%d rules come back, want %d", len(c.Chains["all"].Rules), len(want))
			}
			for i, r := range c.Chains["all"].Rules {
				if r.String() != want[i].String() {
					t.Errorf("rule %d comes back as\n%s\nwant\n%s", i, r, want[i])
				}
			}
			if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil {
				t.Errorf("nft list ruleset: %v\n%s", err, out)
			}
		})
	}
}

// An error names the step, also in a long transaction.
func TestErrorNamesTheStep(t *testing.T) {
	k := inNamespace(t)
	table := Table{IPv4, "errors"}
	s := &Set{Name: "addresses", Key: []Type{TypeAddr}}
	ops := []Op{{Kind: AddTable, Table: table}, {Kind: AddSet, Table: table, Set: s}}
	for i := range 500 {
		e := Element{Key: AddrTuple(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))}
		ops = append(ops, Op{Kind: AddElements, Table: table, Set: s, Elements: []Element{e}, Owner: i})
	}
	ops[300].Elements[0].Key += "\x00"
	err := k.Commit(context.Background(), ops)
	var e *Error
	if !errors.As(err, &e) || e.Op != &ops[300] || !errors.Is(err, unix.EINVAL) {
		t.Errorf("Commit returns %v, want an error of step 300", err)
	}
	if ok, err := k.Exists(context.Background(), table); ok || err != nil {
		t.Errorf("after a refused transaction the table exists: %v, %v", ok, err)
	}
	ops[300].Elements[0].Key = ops[300].Elements[0].Key[:4]
	if err := k.Commit(context.Background(), ops); err != nil {
		t.Error(err)
	}
}

// A set of many elements comes back whole, more than fit into one message.
func TestManyElements(t *testing.T) {
	k := inNamespace(t)
	table := Table{IPv4, "many"}
	s := &Set{Name: "addresses", Key: []Type{TypeAddr}}
	var elements []Element
	for i := range 20_000 {
		elements = append(elements, Element{Key: AddrTuple(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})), Comment: fmt.Sprint("number ", i)})
	}
	err := k.Commit(context.Background(), []Op{
		{Kind: AddTable, Table: table}, {Kind: AddSet, Table: table, Set: s}, {Kind: AddElements, Table: table, Set: s, Elements: elements},
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := k.Read(context.Background(), table)
	if err != nil {
		t.Fatal(err)
	}
	have := c.Elements[s.Name]
	slices.SortFunc(have, func(a, b Element) int { return strings.Compare(string(a.Key), string(b.Key)) })
	if !slices.Equal(have, elements) {
		t.Errorf("%d elements come back, want the %d that were written", len(have), len(elements))
	}
}
