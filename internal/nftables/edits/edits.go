// Package edits collects the writes to sets that bring one Service port from one state
// to another, in the order in which they are safe.
package edits

import (
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// Step orders the writes of one Service port so that a packet finds the old state
// or the new one whatever was written already: data before what leads to it, and
// away only after that.
type Step uint8

const (
	Fresh    Step = iota // elements to which nothing leads yet
	Replaced             // data that is replaced, element by element
	Forget               // clients of endpoints that are gone
	Verdict              // what leads to data, new or gone
	Switch               // what leads to other data than before
	Refuse               // what is behind the verdicts
	Stale                // elements to which nothing leads any more
	Steps
)

// Edits are the writes of one Service port.
type Edits struct {
	Owner plan.ID
	Sets  [Steps][]Set
	Size  int
}

// Set are writes to one set. If both lists are filled they belong together one
// by one: an element is deleted and then added with another content.
type Set struct {
	Name     string
	Del, Add []nft.Element
}

func (e *Edits) At(s Step, set string) *Set {
	list := e.Sets[s]
	for i := range list {
		if list[i].Name == set {
			return &list[i]
		}
	}
	e.Sets[s] = append(list, Set{Name: set})
	return &e.Sets[s][len(list)]
}

func (e *Edits) Insert(s Step, set string, el nft.Element) {
	at := e.At(s, set)
	at.Add = append(at.Add, el)
	e.Size++
}

func (e *Edits) Remove(s Step, set string, el nft.Element) {
	at := e.At(s, set)
	at.Del = append(at.Del, el)
	e.Size++
}

// replace needs a step of its own for sets that also see insert and remove.
func (e *Edits) Replace(s Step, set string, old, el nft.Element) {
	at := e.At(s, set)
	at.Del, at.Add = append(at.Del, old), append(at.Add, el)
	e.Size += 2
}

// OnlyAdds reports whether nothing is replaced or deleted.
func (e *Edits) OnlyAdds() bool {
	for s := range e.Sets {
		for i := range e.Sets[s] {
			if len(e.Sets[s][i].Del) > 0 {
				return false
			}
		}
	}
	return true
}
