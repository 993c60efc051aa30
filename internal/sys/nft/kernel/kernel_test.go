package kernel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
)

// inNamespace makes the test run in a network namespace of its own.
func inNamespace(t *testing.T) *Tables {
	t.Helper()
	nstest.Enter(t)
	k := &Tables{}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	return k
}

// everySet has a set of each kind.
func everySet(f nft.Family) []*nft.Set {
	addr := nft.AddrType(f)
	return []*nft.Set{
		{Name: "addresses", Key: []nft.Type{addr}, Comment: "plain"},
		{Name: "ranges", Key: []nft.Type{addr}, Interval: true},
		{Name: "verdicts", Key: []nft.Type{addr, nft.TypeProto, nft.TypePort}, Verdicts: true},
		{Name: "ports", Key: []nft.Type{nft.TypePort}, Verdicts: true},
		{Name: "slots", Key: []nft.Type{addr, nft.TypeProto, nft.TypePort, nft.TypeNumber}, Data: []nft.Type{addr, nft.TypePort}},
		{Name: "numbered", Key: []nft.Type{addr, nft.TypeProto, nft.TypePort, nft.TypeNumber}, Verdicts: true},
		{Name: "pairs", Key: []nft.Type{addr, addr, nft.TypeProto, nft.TypePort}},
		{Name: "clients", Key: []nft.Type{addr}, Data: []nft.Type{addr, nft.TypePort}, Dynamic: true, Size: 64, Comment: "of a Service"},
	}
}

// everyRule has a rule of each statement.
func everyRule(f nft.Family) []*nft.Rule {
	rule := func(s ...nft.Statement) *nft.Rule { return nft.NewRule(f, s...) }
	remarked := rule(nft.Do{Code: nft.Drop})
	remarked.Comment = "drops all"
	tcp := nft.Is{Field: nft.Proto, Value: nft.Tuple("\x06")}
	return []*nft.Rule{
		rule(tcp, nft.Reject{Reset: true}),
		rule(nft.Reject{}),
		rule(nft.In{Fields: []nft.Field{nft.SrcAddr}, Set: "ranges"}, nft.SetMark(1<<14), nft.Do{Code: nft.Goto, Chain: "target"}),
		rule(nft.In{Fields: []nft.Field{nft.SrcAddr, nft.DstAddr, nft.Proto, nft.DstPort}, Set: "pairs", Not: true}, nft.ClearMark(1<<14), nft.Do{Code: nft.Jump, Chain: "target"}),
		rule(nft.InterfaceIs{Name: "cni0"}, nft.Do{Code: nft.Return}),
		rule(nft.InterfaceIs{Name: "vx", Prefix: true, Not: true}, nft.Has{Field: nft.Mark, Bits: 1 << 3}, nft.Do{Code: nft.Accept}),
		rule(nft.SrcIsLocal{}, tcp, nft.DNAT{Fields: []nft.Field{nft.SrcAddr}, Map: "clients"}),
		rule(nft.DNAT{Fields: []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort}, Slots: 3, Map: "slots"}),
		rule(nft.DNAT{Fields: []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort}, Slots: 300, First: 1 << 20, Map: "slots"}),
		rule(nft.Dispatch{Fields: []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort}, Map: "verdicts"}),
		rule(nft.Dispatch{Fields: []nft.Field{nft.DstAddr, nft.Proto, nft.DstPort}, Number: 2, Map: "numbered"}),
		rule(nft.Has{Field: nft.Mark, Bits: 1 << 14}, nft.SetFlowMark(1<<15)),
		rule(nft.Has{Field: nft.FlowMark, Bits: 1 << 15}, nft.Is{Field: nft.Direction, Value: nft.ToClient}, nft.SetMark(1<<15)),
		rule(nft.Has{Field: nft.State, Bits: nft.StateNew}, nft.Has{Field: nft.Status, Bits: nft.StatusDNAT}, tcp,
			nft.In{Fields: []nft.Field{nft.OrigDstAddr}, Set: "addresses"}, nft.Dispatch{Fields: []nft.Field{nft.OrigDstPort}, Map: "ports"}),
		rule(nft.Remember{Map: "clients", Key: []nft.Field{nft.SrcAddr}, Data: []nft.Field{nft.DstAddr, nft.DstPort}, Timeout: 3 * time.Hour}),
		remarked,
	}
}

// steps are a random transaction: mostly sensible, sometimes refused.
func steps(rng *rand.Rand, t nft.Table) []nft.Op {
	sets, rules := everySet(t.Family), everyRule(t.Family)
	addr := func() netip.Addr {
		a := netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(12))})
		if t.Family == nft.IPv6 {
			a = netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: byte(rng.IntN(12))})
		}
		return a
	}
	elements := func(s *nft.Set) []nft.Element {
		var out []nft.Element
		for range 1 + rng.IntN(4) {
			c := nft.Concat(nil)
			e := nft.Element{Comment: []string{"", "default/web:http"}[rng.IntN(2)]}
			for _, typ := range s.Key {
				switch typ {
				case nft.TypeProto:
					c = c.Proto(6)
				case nft.TypePort:
					c = c.Port(uint16(80 + rng.IntN(3)))
				case nft.TypeNumber:
					c = c.Number(uint32(rng.IntN(3)))
				default:
					c = c.Addr(addr())
				}
			}
			e.Key = c.Tuple()
			if len(s.Key) == 1 && s.Key[0] == nft.TypePort {
				e.Key = nft.PortTuple(uint16(80 + rng.IntN(3)))
			}
			switch {
			case s.Verdicts:
				e.Verdict = []nft.Verdict{{Code: nft.Drop}, {Code: nft.Goto, Chain: "target"}}[rng.IntN(2)]
			case len(s.Data) > 0:
				e.Data = nft.Concat(nil).Addr(addr()).Port(8080).Tuple()
			}
			if s.Dynamic {
				e.Timeout = time.Hour
			}
			out = append(out, e)
		}
		return out
	}
	var ops []nft.Op
	for range 1 + rng.IntN(4) {
		s := sets[rng.IntN(len(sets))]
		chain := []string{"target", "other", "third"}[rng.IntN(3)]
		o := [...]nft.Op{
			{Kind: nft.AddSet, Set: s}, {Kind: nft.DeleteSet, Name: s.Name}, {Kind: nft.FlushSet, Name: s.Name},
			{Kind: nft.AddElements, Set: s}, {Kind: nft.AddElements, Set: s}, {Kind: nft.DeleteElements, Set: s},
			{Kind: nft.AddChain, Chain: &nft.Chain{Name: chain, Comment: "for " + chain}}, {Kind: nft.DeleteChain, Name: chain}, {Kind: nft.FlushChain, Name: chain},
			{Kind: nft.AddRule, Name: chain, Rule: rules[rng.IntN(len(rules))]},
		}[rng.IntN(10)]
		if o.Kind == nft.AddElements || o.Kind == nft.DeleteElements {
			o.Elements = elements(s)
			if s.Interval { // whole ranges only
				o.Kind = nft.AddElements
				p := netip.PrefixFrom(addr(), addr().BitLen()-2).Masked()
				o.Elements = nft.Intervals([]netip.Prefix{p})
			}
		}
		ops = append(ops, o)
	}
	if rng.IntN(60) == 0 {
		ops = append(ops, nft.Op{Kind: nft.DeleteTable}, nft.Op{Kind: nft.AddTable, Comment: "again"})
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
	for _, f := range []nft.Family{nft.IPv4, nft.IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			k, memory := inNamespace(t), &fake.Tables{}
			ctx := context.Background()
			table := nft.Table{Family: f, Name: "honest"}
			rng := rand.New(rand.NewPCG(5, uint64(f)))
			start := []nft.Op{{Kind: nft.AddTable, Table: table, Comment: "of a test"}}
			for _, s := range everySet(f) {
				start = append(start, nft.Op{Kind: nft.AddSet, Table: table, Set: s})
			}
			refused := 0
			for step := range honestSteps {
				ops := start
				if step > 0 {
					ops = steps(rng, table)
				}
				kerr, ferr := k.Commit(ctx, ops), memory.Commit(ctx, ops)
				if ebusy := errors.Is(kerr, nft.ErrBusy) && ferr == nil; ebusy {
					t.Skipf("needs Linux 6.2, which lets go of chains in the same transaction (step %d)", step)
				}
				if (kerr == nil) != (ferr == nil) {
					t.Fatalf("step %d: %v: the kernel says %v, the fake %v\n%s", step, text(ops), kerr, ferr, memory)
				}
				if kerr != nil {
					refused++
					a, aok := errors.AsType[*nft.Error](kerr)
					b, bok := errors.AsType[*nft.Error](ferr)
					if !aok || !bok || a.Op == nil || b.Op == nil || a.Op.Kind != b.Op.Kind {
						t.Fatalf("step %d: %v: the kernel says %v, the fake %v", step, text(ops), kerr, ferr)
					}
				}
				have, err := k.Read(ctx, table)
				if err != nil {
					t.Fatal(err)
				}
				want, err := memory.Read(ctx, table)
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

func text(ops []nft.Op) []string {
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
	for _, f := range []nft.Family{nft.IPv4, nft.IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			k := inNamespace(t)
			ctx := context.Background()
			table := nft.Table{Family: f, Name: "rules"}
			ops := []nft.Op{{Kind: nft.AddTable}, {Kind: nft.AddChain, Chain: &nft.Chain{Name: "target"}}, {Kind: nft.AddChain, Chain: &nft.Chain{Name: "all"}}}
			for _, s := range everySet(f) {
				ops = append(ops, nft.Op{Kind: nft.AddSet, Set: s})
			}
			for _, r := range everyRule(f) {
				ops = append(ops, nft.Op{Kind: nft.AddRule, Name: "all", Rule: r})
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
	table := nft.Table{Family: nft.IPv4, Name: "errors"}
	s := &nft.Set{Name: "addresses", Key: []nft.Type{nft.TypeAddr}}
	ops := []nft.Op{{Kind: nft.AddTable, Table: table}, {Kind: nft.AddSet, Table: table, Set: s}}
	for i := range 500 {
		e := nft.Element{Key: nft.AddrTuple(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))}
		ops = append(ops, nft.Op{Kind: nft.AddElements, Table: table, Set: s, Elements: []nft.Element{e}, Owner: i})
	}
	ops[300].Elements[0].Key += "\x00"
	err := k.Commit(context.Background(), ops)
	var e *nft.Error
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
	table := nft.Table{Family: nft.IPv4, Name: "many"}
	s := &nft.Set{Name: "addresses", Key: []nft.Type{nft.TypeAddr}}
	var elements []nft.Element
	for i := range 20_000 {
		elements = append(elements, nft.Element{Key: nft.AddrTuple(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})), Comment: fmt.Sprint("number ", i)})
	}
	err := k.Commit(context.Background(), []nft.Op{
		{Kind: nft.AddTable, Table: table}, {Kind: nft.AddSet, Table: table, Set: s}, {Kind: nft.AddElements, Table: table, Set: s, Elements: elements},
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := k.Read(context.Background(), table)
	if err != nil {
		t.Fatal(err)
	}
	have := c.Elements[s.Name]
	slices.SortFunc(have, func(a, b nft.Element) int { return strings.Compare(string(a.Key), string(b.Key)) })
	if !slices.Equal(have, elements) {
		t.Errorf("%d elements come back, want the %d that were written", len(have), len(elements))
	}
}
