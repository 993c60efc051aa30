package nft_test

import (
	"context"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
)

// mustFill makes a table as a mode has it: a base chain that leads to others by a map.
func mustFill(t *testing.T, k *fake.Tables, table nft.Table) {
	t.Helper()
	ports := &nft.Set{Name: "ports", Key: []nft.Type{nft.TypeProto, nft.TypePort}, Verdicts: true}
	rule := func(s ...nft.Statement) *nft.Rule { return nft.NewRule(table.Family, s...) }
	err := k.Commit(t.Context(), []nft.Op{
		{Kind: nft.AddTable, Table: table},
		{Kind: nft.AddSet, Table: table, Set: ports},
		{Kind: nft.AddChain, Table: table, Chain: &nft.Chain{Name: "refuse"}},
		{Kind: nft.AddRule, Table: table, Name: "refuse", Rule: rule(nft.Reject{})},
		{Kind: nft.AddChain, Table: table, Chain: &nft.Chain{Name: "input", Hook: &nft.Hook{Type: "filter", Num: nft.Input}}},
		{Kind: nft.AddRule, Table: table, Name: "input", Rule: rule(nft.Dispatch{Fields: []nft.Field{nft.Proto, nft.DstPort}, Map: "ports"})},
		{Kind: nft.AddElements, Table: table, Set: ports, Elements: []nft.Element{{
			Key: nft.Concat(nil).Proto(6).Port(80).Tuple(), Verdict: nft.Verdict{Code: nft.Goto, Chain: "refuse"},
		}}},
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestRemoveTakesPacketsOutFirst(t *testing.T) {
	k := &fake.Tables{}
	ours, other := nft.Table{Family: nft.IPv4, Name: "ours"}, nft.Table{Family: nft.IPv4, Name: "other"}
	mustFill(t, k, ours)
	mustFill(t, k, other)
	deleted := false
	k.Refuse = func(ops []nft.Op) error {
		for _, o := range ops {
			if o.Kind != nft.DeleteTable {
				continue
			}
			deleted = true
			c, err := k.Read(context.Background(), ours)
			if err != nil {
				return err
			}
			for name, ch := range c.Chains {
				if ch.Hook != nil {
					t.Errorf("the table is deleted while packets are led to chain %s", name)
				}
			}
			if len(c.Elements["ports"]) != 1 {
				t.Error("elements went before the table, while packets might look for them")
			}
		}
		return nil
	}
	if removed, err := nft.Remove(t.Context(), k, ours); err != nil || !removed || !deleted {
		t.Fatalf("removed: %v, %v", removed, err)
	}
	for table, want := range map[nft.Table]bool{ours: false, other: true} {
		if have, err := nft.Present(t.Context(), k, table); err != nil || have != want {
			t.Errorf("table %s is there: %v, want %v (%v)", table, have, want, err)
		}
	}
	if removed, err := nft.Remove(t.Context(), k, ours); err != nil || removed {
		t.Errorf("the second time: removed: %v, %v", removed, err)
	}
}

func TestRemoveWhereOthersAreFasterOrTheKernelCannot(t *testing.T) {
	ours := nft.Table{Family: nft.IPv4, Name: "ours"}
	for _, c := range []struct {
		refuse error
		wrong  bool
	}{{unix.ENOENT, false}, {unix.ENOBUFS, true}} {
		k := &fake.Tables{}
		mustFill(t, k, ours)
		k.Refuse = func([]nft.Op) error { return c.refuse }
		if removed, err := nft.Remove(t.Context(), k, ours); removed || (err != nil) != c.wrong || c.wrong && !errors.Is(err, c.refuse) {
			t.Errorf("%v: removed: %v, %v", c.refuse, removed, err)
		}
	}
	if removed, err := nft.Remove(t.Context(), without{&fake.Tables{}}, ours); removed || err != nil {
		t.Errorf("a kernel without the family: removed: %v, %v", removed, err)
	}
}

// without is a kernel that lacks the family.
type without struct{ nft.Tables }

func (without) Exists(context.Context, nft.Table) (bool, error) { return false, unix.EAFNOSUPPORT }
