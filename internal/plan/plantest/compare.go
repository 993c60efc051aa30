// Package plantest has what the tests of several modes need: random plans in a small
// world of addresses, the way from one to another, and what a plan says that becomes
// of a packet. Only tests import it.
package plantest

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// Difference makes the update from one plan to another, as a planner would.
func Difference(a, b *plan.Plan) plan.Update {
	u := plan.Update{Plan: b, Node: a == nil || !a.Node.Equal(b.Node)}
	olds := map[plan.ID]*plan.ServicePort{}
	if a != nil {
		olds = a.Services
	}
	for id, old := range olds {
		if sp := b.Services[id]; sp != old {
			u.Changed = append(u.Changed, plan.Change{ID: id, Old: old, New: sp})
		}
	}
	for id, sp := range b.Services {
		if olds[id] == nil {
			u.Changed = append(u.Changed, plan.Change{ID: id, New: sp})
		}
	}
	slices.SortFunc(u.Changed, func(x, y plan.Change) int { return x.ID.Compare(y.ID) })
	return u
}

// FirstDifference says where two listings differ first.
func FirstDifference(have, want string) string {
	h, w := strings.Split(have, "\n"), strings.Split(want, "\n")
	for i := range min(len(h), len(w)) {
		if h[i] != w[i] {
			return fmt.Sprintf("line %d:\nhave %s\nwant %s", i+1, h[i], w[i])
		}
	}
	return fmt.Sprintf("have %d lines, want %d", len(h), len(w))
}

// Counts are a loop's Stats in memory. What is observed adds up.
type Counts struct {
	mu sync.Mutex // guards at
	at map[string]float64
}

func (c *Counts) put(metric string, v float64, add bool, labels []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at == nil {
		c.at = map[string]float64{}
	}
	key := fmt.Sprint(metric, labels)
	if add {
		v += c.at[key]
	}
	c.at[key] = v
}

func (c *Counts) Add(metric string, v float64, labels ...string)     { c.put(metric, v, true, labels) }
func (c *Counts) Set(metric string, v float64, labels ...string)     { c.put(metric, v, false, labels) }
func (c *Counts) Observe(metric string, v float64, labels ...string) { c.put(metric, v, true, labels) }

// Get returns a value; 0 if there is none.
func (c *Counts) Get(metric string, labels ...string) float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at[fmt.Sprint(metric, labels)]
}
