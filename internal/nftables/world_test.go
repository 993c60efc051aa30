package nftables

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/nftables/owned"
	"github.com/svcproxy/svcproxy/internal/nftables/slots"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

func testEnv(families ...plan.Family) dataplane.Env {
	return dataplane.Env{Log: slog.New(slog.DiscardHandler), Stats: &plantest.Counts{}, Families: families, MasqueradeBit: 14}
}

func mustApply(t testing.TB, b *backend, u plan.Update) {
	t.Helper()
	if err := b.Apply(context.Background(), u); err != nil {
		t.Fatalf("Apply: %v", err)
	}
}

// state lists a family's table so that what may differ by history does not count:
// which endpoint has which slot, and whether the table goes by the other name.
func state(t testing.TB, tables nft.Tables, f plan.Family) string {
	t.Helper()
	for _, name := range owned.Tables(f) {
		c, err := tables.Read(context.Background(), name)
		if err != nil {
			continue
		}
		for _, set := range []string{setEndpoints, setPortEndpoints} {
			c.Elements[set] = regardlessOfSlots(c.Elements[set])
		}
		c.Table.Name = "svcproxy"
		return c.String()
	}
	return ""
}

// regardlessOfSlots renumbers the slots of each frontend and pool by endpoint.
func regardlessOfSlots(elements []nft.Element) []nft.Element {
	const number = 4 // bytes, at the end of a key
	pools := map[nft.Tuple][]nft.Element{}
	for _, e := range elements {
		front := e.Key[:len(e.Key)-number]
		pools[front] = append(pools[front], e)
	}
	var out []nft.Element
	for _, list := range pools {
		var slots, eps []nft.Tuple
		for _, p := range [][]nft.Element{local(list, false), local(list, true)} {
			slots, eps = slots[:0], eps[:0]
			for _, e := range p {
				slots, eps = append(slots, e.Key), append(eps, e.Data)
			}
			slices.Sort(slots)
			slices.Sort(eps)
			for i := range slots {
				out = append(out, nft.Element{Key: slots[i], Data: eps[i]})
			}
		}
	}
	return out
}

// local picks the elements of the Local pool, or the others.
func local(list []nft.Element, yes bool) []nft.Element {
	first := nft.Concat(nil).Number(slots.Local).Tuple()
	var out []nft.Element
	for _, e := range list {
		slot := e.Key[len(e.Key)-len(first):]
		if strings.Contains(string(slot), string(first[1:3])) == yes {
			out = append(out, e)
		}
	}
	return out
}
