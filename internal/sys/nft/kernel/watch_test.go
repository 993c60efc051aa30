package kernel

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// manyElements is more than a small buffer has room for.
func manyElements() []nft.Element {
	out := make([]nft.Element, 5000)
	for i := range out {
		out[i].Key = nft.AddrTuple(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))
	}
	return out
}

// watchSmall watches all tables with hardly any buffer, in the namespace of the test.
func watchSmall(t *testing.T, k *Tables) <-chan nft.Event {
	t.Helper()
	k.eventBuffer = 4 << 10
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	told, ready, ended := make(chan nft.Event, 1<<16), make(chan struct{}), make(chan error, 1)
	go func() {
		defer ns.Close()
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			ended <- err
			return
		}
		ended <- k.Watch(ctx, func(nft.Table) bool { return true }, ready, func(e nft.Event) { told <- e })
	}()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Watch ends with %v", err)
		}
	})
	return told
}

// The number of others' commits follows from the kernel's count: our own do not change
// it, nor do those that the kernel refuses.
func TestOthers(t *testing.T) {
	k := inNamespace(t)
	ctx := context.Background()
	other := &Tables{}
	t.Cleanup(func() { _ = other.Close() })
	before, err := k.Others(ctx)
	if err != nil {
		t.Fatal(err)
	}
	table := nft.Table{Family: nft.IPv4, Name: "own"}
	s := &nft.Set{Name: "addresses", Key: []nft.Type{nft.TypeAddr}}
	for _, ops := range [][]nft.Op{
		{{Kind: nft.AddTable, Table: table}, {Kind: nft.AddSet, Table: table, Set: s}},
		{{Kind: nft.AddElements, Table: table, Set: s, Elements: manyElements()}},
	} {
		if err := k.Commit(ctx, ops); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.Commit(ctx, []nft.Op{{Kind: nft.DeleteSet, Table: table, Name: "none"}}); err == nil {
		t.Error("a set that is not there can be deleted")
	}
	if now, err := k.Others(ctx); err != nil || now != before {
		t.Errorf("after commits of our own: %d, %v, want %d", now, err, before)
	}
	if err := other.Commit(ctx, []nft.Op{{Kind: nft.AddTable, Table: nft.Table{Family: nft.IPv6, Name: "foreign"}}}); err != nil {
		t.Fatal(err)
	}
	if now, err := k.Others(ctx); err != nil || now == before {
		t.Errorf("after another's commit: %d, %v, want another number", now, err)
	}
}

// Our own commits take no room from the notifications of others, however large they are.
func TestOwnCommitsAreNotTold(t *testing.T) {
	k := inNamespace(t)
	other := &Tables{}
	t.Cleanup(func() { _ = other.Close() })
	told := watchSmall(t, k)
	own, foreign := nft.Table{Family: nft.IPv4, Name: "own"}, nft.Table{Family: nft.IPv4, Name: "foreign"}
	s := &nft.Set{Name: "addresses", Key: []nft.Type{nft.TypeAddr}}
	for range 5 {
		for _, ops := range [][]nft.Op{
			{{Kind: nft.AddTable, Table: own}, {Kind: nft.AddSet, Table: own, Set: s}, {Kind: nft.AddElements, Table: own, Set: s, Elements: manyElements()}},
			{{Kind: nft.DeleteTable, Table: own}},
		} {
			if err := k.Commit(context.Background(), ops); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := other.Commit(context.Background(), []nft.Op{{Kind: nft.AddTable, Table: foreign}, {Kind: nft.AddSet, Table: foreign, Set: s}}); err != nil {
		t.Fatal(err)
	}
	if e := <-told; e.Table != foreign {
		t.Errorf("told is %+v, want the other's change", e)
	}
}

// What the kernel could not deliver is told.
func TestLossIsTold(t *testing.T) {
	k := inNamespace(t)
	other := &Tables{}
	t.Cleanup(func() { _ = other.Close() })
	told := watchSmall(t, k)
	foreign := nft.Table{Family: nft.IPv4, Name: "foreign"}
	s := &nft.Set{Name: "addresses", Key: []nft.Type{nft.TypeAddr}}
	ops := []nft.Op{{Kind: nft.AddTable, Table: foreign}, {Kind: nft.AddSet, Table: foreign, Set: s}, {Kind: nft.AddElements, Table: foreign, Set: s, Elements: manyElements()}}
	for {
		if err := other.Commit(context.Background(), ops); err != nil {
			t.Fatal(err)
		}
		for len(told) > 0 {
			if e := <-told; e.What == lost {
				return
			}
		}
		if err := other.Commit(context.Background(), []nft.Op{{Kind: nft.DeleteTable, Table: foreign}}); err != nil {
			t.Fatal(err)
		}
	}
}
