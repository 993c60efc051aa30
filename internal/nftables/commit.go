package nftables

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/svcproxy/svcproxy/internal/nftables/edits"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// add appends a step to the batch.
func (f *family) add(o nft.Op) {
	o.Table = f.table
	f.batch = append(f.batch, o)
	f.size += len(o.Elements)
}

// emit appends the writes of one Service port, and commits what is large enough.
func (f *family) emit(e *edits.Edits) {
	if f.size > 0 && f.size+e.Size > elementsPerCommit {
		f.cut()
	}
	for s := range edits.Steps {
		for i := range e.Sets[s] {
			f.emitSet(e, &e.Sets[s][i])
		}
	}
	if f.size >= elementsPerCommit {
		f.cut()
	}
}

const (
	firstLeads = 200
	mostLeads  = 4000
)

// emitNew appends a Service port that nobody could reach yet; at the start there are
// many. Every commit that adds verdicts makes the kernel walk all there are, so these are
// collected: few at first, for the Services that come first, then more and more.
func (f *family) emitNew(e *edits.Edits) {
	if f.hold || !e.OnlyAdds() { // somebody may reach it all the same
		f.emit(e)
		return
	}
	for i := range e.Sets[edits.Fresh] {
		f.emitSet(e, &e.Sets[edits.Fresh][i])
	}
	for s := edits.Verdict; s <= edits.Refuse; s++ {
		for _, set := range e.Sets[s] {
			f.leads = append(f.leads, nft.Op{Kind: nft.AddElements, Table: f.table, Set: f.set(set.Name), Elements: set.Add, Owner: e.Owner})
			f.leadSize += len(set.Add)
		}
	}
	if f.size >= elementsPerCommit {
		f.cut()
	}
	if f.leadSize >= f.leadLimit {
		f.cut()
		f.lead()
		f.cut()
		f.leadLimit = min(2*f.leadLimit, mostLeads)
	}
}

// lead appends the verdicts that emitNew kept back.
func (f *family) lead() {
	f.batch = append(f.batch, f.leads...)
	f.size += f.leadSize
	f.leads, f.leadSize = nil, 0
}

// guard appends the addresses whose segments outside of any connection are dropped. They
// come last: at the start they are as many as the endpoints, and Services work without.
func (f *family) guard() {
	c := &change{f: f}
	for chunk := range slices.Chunk(f.guards, elementsPerCommit) {
		c.edits = &edits.Edits{}
		fresh := c.edits.At(edits.Fresh, setEndpointAddrs)
		fresh.Add = slices.Grow(fresh.Add, len(chunk))
		for _, k := range chunk {
			c.add(edits.Fresh, k.kind.set(), k.element(f.fam))
		}
		f.emit(c.edits)
	}
	f.guards = nil
}

// emitSet appends writes to one set, in parts if there are many.
func (f *family) emitSet(e *edits.Edits, s *edits.Set) {
	del, add := s.Del, s.Add
	for len(del) > 0 || len(add) > 0 {
		d, a := min(len(del), elementsPerCommit), min(len(add), elementsPerCommit)
		if d > 0 {
			f.add(nft.Op{Kind: nft.DeleteElements, Set: f.set(s.Name), Elements: del[:d], Owner: e.Owner})
		}
		if a > 0 {
			f.add(nft.Op{Kind: nft.AddElements, Set: f.set(s.Name), Elements: add[:a], Owner: e.Owner})
		}
		del, add = del[d:], add[a:]
		if e.Size > elementsPerCommit && f.size >= elementsPerCommit {
			f.cut()
		}
	}
}

// set returns the declaration by name; of those that are not always there, the name
// and the type of keys matter only.
func (f *family) set(name string) *nft.Set {
	if s := f.core[name]; s != nil {
		return s
	}
	return &nft.Set{Name: name, Dynamic: true}
}

// cut commits the batch, unless it belongs together. The kernel works on it while the
// next one is made.
func (f *family) cut() {
	batch := f.batch
	if f.hold || len(batch) == 0 {
		return
	}
	f.batch, f.size = nil, 0
	if f.await(); f.err != nil {
		return
	}
	under := make(chan outcome, 1)
	f.underWay = under
	go func() {
		var o outcome
		defer func() {
			o.panicked = recover()
			under <- o
		}()
		o.err = f.write(batch)
	}()
}

// outcome is how a commit ended.
type outcome struct {
	err      error
	panicked any
}

// await waits for the commit under way, so that the kernel can be asked again.
func (f *family) await() {
	if f.underWay == nil {
		return
	}
	o := <-f.underWay
	f.underWay = nil
	if o.panicked != nil {
		panic(o.panicked)
	}
	f.err = cmp.Or(f.err, o.err)
}

// commit writes the batch. After an error nothing more is written.
func (f *family) commit() {
	f.await()
	batch := f.batch
	f.batch, f.size = nil, 0
	if f.err == nil && len(batch) > 0 {
		f.err = f.write(batch)
	}
}

// forgetTries bounds how often clients are listed anew that went away by themselves
// between listing and commit.
const forgetTries = 8

// write commits steps.
func (f *family) write(batch []nft.Op) error {
	for try := 0; ; try++ {
		err := f.tables.Commit(f.ctx, batch)
		e, ok := errors.AsType[*nft.Error](err)
		if !ok || e.Op == nil || !isForget(e.Op) || !errors.Is(err, nft.ErrNotExist) || try >= forgetTries {
			return err
		}
		if e.Op.Elements, err = f.stillThere(e.Op, try); err != nil { // e.Op is within batch
			return err
		}
	}
}

// isForget reports whether a step deletes clients from an affinity map.
func isForget(o *nft.Op) bool { return o.Kind == nft.DeleteElements && o.Set != nil && o.Set.Dynamic }

// stillThere lists again the clients of the endpoints whose clients a step deletes;
// in the end none, which leaves them to the sweep after the commit.
func (f *family) stillThere(o *nft.Op, try int) ([]nft.Element, error) {
	if try == forgetTries-1 {
		return nil, nil
	}
	dead := map[nft.Tuple]bool{}
	for _, e := range o.Elements {
		dead[e.Data] = true
	}
	var left []nft.Element
	err := f.tables.Elements(f.ctx, f.table, o.Set, func(e nft.Element) {
		if dead[e.Data] {
			left = append(left, e)
		}
	})
	return left, err
}

// What the kernel holds on to is tried again after a pause, which grows.
const (
	tidyFirst = time.Second
	tidyLast  = time.Minute
)

// tidy deletes what nobody needs any more. What the kernel still holds on to is
// tried again with the next change, or after a pause: before Linux 6.2 it lets go of a
// chain only some time after the last element that led there.
func (f *family) tidy() {
	f.tidyAt = time.Time{}
	ops := f.surplus()
	if len(ops) > 0 && f.tables.Commit(f.ctx, ops) == nil {
		for i := range ops {
			f.gone(ops[i].Name)
		}
		ops = nil
	}
	left := 0
	for i := range ops {
		err := f.tables.Commit(f.ctx, ops[i:i+1])
		if err == nil || errors.Is(err, nft.ErrNotExist) {
			f.gone(ops[i].Name)
			continue
		}
		left++
		if !errors.Is(err, nft.ErrBusy) {
			f.env.Stats.Add("sync_proxy_rules_nftables_cleanup_failures_total", 1, f.fam.String())
			f.env.Log.Warn("an unused nftables object cannot be deleted; it is tried again", "error", err)
		}
	}
	if left == 0 {
		f.tidyPause = 0
		return
	}
	f.tidyPause = min(max(2*f.tidyPause, tidyFirst), tidyLast)
	f.tidyAt = f.now().Add(f.tidyPause)
}

func (f *family) gone(name string) {
	delete(f.unused, name)
	delete(f.objects, name)
}
