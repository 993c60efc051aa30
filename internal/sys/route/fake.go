package route

import (
	"context"
	"net/netip"
	"slices"
	"sync"
)

// Fake is a routing in memory; the zero value is empty. Safe for concurrent use.
type Fake struct {
	// Refuse, if set, is asked before each change and may refuse it.
	Refuse func(Entry) error
	// Source4 and Source6 are the addresses from which the host sends.
	Source4, Source6 netip.Addr

	mu       sync.Mutex // guards all below
	entries  []Entry
	watchers map[int]func(string)
	next     int
}

var _ Routing = (*Fake)(nil)

// List implements Routing.
func (f *Fake) List(context.Context) ([]Entry, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.entries), nil
}

// Add implements Routing.
func (f *Fake) Add(_ context.Context, e Entry) error {
	if f.Refuse != nil {
		if err := f.Refuse(e); err != nil {
			return err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !slices.Contains(f.entries, e) {
		f.entries = append(f.entries, e)
	}
	return nil
}

// Delete implements Routing.
func (f *Fake) Delete(_ context.Context, e Entry) error {
	if f.Refuse != nil {
		if err := f.Refuse(e); err != nil {
			return err
		}
	}
	f.mu.Lock()
	i := slices.Index(f.entries, e)
	if i < 0 {
		f.mu.Unlock()
		return nil
	}
	f.entries = slices.Delete(f.entries, i, i+1)
	var tell []func(string)
	for _, w := range f.watchers {
		tell = append(tell, w)
	}
	f.mu.Unlock()
	if e.Source.IsValid() {
		return nil
	}
	what := "a routing rule of ours was deleted"
	if e.IsRoute() {
		what = "a route of ours was deleted"
	}
	for _, w := range tell {
		w(what)
	}
	return nil
}

// From implements Routing.
func (f *Fake) From(to netip.Addr) (netip.Addr, error) {
	if to.Is4() {
		return f.Source4, nil
	}
	return f.Source6, nil
}

// Watch implements Routing.
func (f *Fake) Watch(ctx context.Context, ready chan<- struct{}, gone func(string)) error {
	f.mu.Lock()
	if f.watchers == nil {
		f.watchers = map[int]func(string){}
	}
	id := f.next
	f.next++
	f.watchers[id] = gone
	f.mu.Unlock()
	close(ready)
	<-ctx.Done()
	f.mu.Lock()
	delete(f.watchers, id)
	f.mu.Unlock()
	return ctx.Err()
}
