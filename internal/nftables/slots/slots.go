// Package slots gives the endpoints of a pool numbers, by which a random number chooses
// one, and says among how many numbers is drawn. It is pure.
package slots

import (
	"net/netip"

	"github.com/svcproxy/svcproxy/internal/plan"
)

const (
	// Local is the number of the first slot of the Local pool; those of the Cluster
	// pool begin at 0.
	Local = 1 << 20
	// Most is how many a pool can have. Weights whose sum is larger are
	// rounded.
	Most = 1 << 16
)

// copies says how many slots each endpoint of a pool gets.
type copies struct {
	pool    []plan.Endpoint
	divisor int // of weights
}

// weighted divides the weights of a pool by their greatest common divisor; if the
// sum is too large still, by more, rounding up.
func weighted(pool []plan.Endpoint) copies {
	c := copies{pool: pool}
	sum := 0
	for _, e := range pool {
		c.divisor = gcd(c.divisor, int(e.Weight))
		sum += int(e.Weight)
	}
	if c.divisor == 0 {
		c.divisor = 1
	}
	if room := Most - len(pool); room > 0 && sum/c.divisor > Most {
		c.divisor = (sum + room - 1) / room
	}
	return c
}

// Total returns how many slots a pool needs.
func Total(pool []plan.Endpoint) int { return weighted(pool).total() }

func (c copies) of(e *plan.Endpoint) int { return (int(e.Weight) + c.divisor - 1) / c.divisor }

func (c copies) total() int {
	n := 0
	for i := range c.pool {
		n += c.of(&c.pool[i])
	}
	return n
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// Assign gives each endpoint of a pool its slots and moves as few as it can: those
// that stay keep theirs, new ones take the free ones, and the last ones fill what
// is free then.
func Assign(old []netip.AddrPort, pool []plan.Endpoint) []netip.AddrPort {
	c := weighted(pool)
	total := c.total()
	if total == 0 {
		return nil
	}
	out := make([]netip.AddrPort, 0, max(total, len(old)))
	if len(old) == 0 {
		for i := range pool {
			for range c.of(&pool[i]) {
				out = append(out, pool[i].Addr)
			}
		}
		return out
	}
	need := make(map[netip.AddrPort]int, len(pool))
	for i := range pool {
		need[pool[i].Addr] = c.of(&pool[i])
	}
	out = append(out, old...)
	var free []int
	for i, a := range old {
		if need[a] > 0 {
			need[a]--
			continue
		}
		free = append(free, i)
	}
	for i := range pool {
		for range need[pool[i].Addr] {
			if len(free) > 0 {
				out[free[0]] = pool[i].Addr
				free = free[1:]
				continue
			}
			out = append(out, pool[i].Addr)
		}
	}
	for len(out) > total { // free holds what is between 0 and len(out), ascending
		last := len(out) - 1
		if n := len(free) - 1; free[n] == last {
			free = free[:n]
		} else {
			out[free[0]] = out[last]
			free = free[1:]
		}
		out = out[:last]
	}
	return out
}

// fewPlaces is the smallest number of places. Pools of one to so many endpoints are drawn
// alike, so that most Services never pass from one number to another.
const fewPlaces = 4

// Places returns among how many places n endpoints are drawn: the next of 4, 8, 16 and
// so on, none for none. Above 4, more than half of the places are taken.
func Places(n int) int {
	if n == 0 {
		return 0
	}
	places := fewPlaces
	for places < n {
		places *= 2
	}
	return places
}

// mostDraws is after how many draws, of which each succeeds more often than not, it does
// not matter any more that none did: it happens less than once in 2^32, which is as
// fine as the kernel's random numbers are.
const mostDraws = 33

// Draws returns the numbers below which is drawn among places, one after the other
// until a number is taken: however many places are, every endpoint has the same share.
// Each draw leaves out the last place of the one before, down to the fewest that can be
// taken, so that none is missed; if that would take too many draws, each is among all
// places. The last, in any case, is the first place's alone, for flows that an
// endpoint's removal overtakes, and for those whose draws all fail.
func Draws(places int) []int {
	fewest := places/2 + 1
	if places <= fewPlaces {
		fewest = 1
	}
	var below []int
	for i := range min(places-fewest+1, mostDraws) {
		below = append(below, places)
		if places-fewest < mostDraws {
			below[i] -= i
		}
	}
	if below[len(below)-1] > 1 {
		below = append(below, 1)
	}
	return below
}

// Move is a slot whose endpoint differs; an invalid address is none.
type Move struct {
	Pool     plan.Pool
	Slot     int
	Old, New netip.AddrPort
}

// Moves compares the slots of both pools of a Service port.
func Moves(old, new [2][]netip.AddrPort) []Move {
	var out []Move
	for pool := range new {
		a, b := old[pool], new[pool]
		for i := range max(len(a), len(b)) {
			m := Move{Pool: plan.Pool(pool), Slot: i}
			if i < len(a) {
				m.Old = a[i]
			}
			if i < len(b) {
				m.New = b[i]
			}
			if m.Old != m.New {
				out = append(out, m)
			}
		}
	}
	return out
}
