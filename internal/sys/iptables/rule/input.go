package rule

import (
	"bufio"
	"iter"
	"slices"
	"sort"

	"github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// Section is what one commit does to a table. Owners of type K, whose zero value
// stands for nobody, tell whose rule a failure is about.
type Section[K comparable] struct {
	Table  iptables.Table
	Flush  []Chain            // created, or emptied before rules are added
	Owned  iter.Seq2[K, *Set] // sets with chains among Flush, which are written
	Shared *Set               // the same, nobody's; may be nil
	Insert []Jumping          // put in front of built-in chains
	Remove []Jumping          // taken out of built-in chains
	Delete []Chain            // emptied and removed
	write  map[Chain]struct{} // Flush as a set
}

// Rewrite adds a chain to Flush.
func (s *Section[K]) Rewrite(c Chain) {
	if s.write == nil {
		s.write = map[Chain]struct{}{}
	}
	if _, ok := s.write[c]; !ok {
		s.write[c] = struct{}{}
		s.Flush = append(s.Flush, c)
	}
}

// Rewrites reports whether c is in Flush.
func (s *Section[K]) Rewrites(c Chain) bool {
	_, ok := s.write[c]
	return ok
}

// Empty reports whether there is nothing to do.
func (s *Section[K]) Empty() bool {
	return len(s.Flush)+len(s.Insert)+len(s.Remove)+len(s.Delete) == 0
}

// Input writes sections in iptables-restore's language and remembers whose each line
// is.
type Input[K comparable] struct {
	Rules map[iptables.Table]int // written

	w      *bufio.Writer
	line   int
	owners []owned[K]
	err    error
}

// owned says that the lines from first on belong to somebody.
type owned[K comparable] struct {
	first int
	owner K
}

func (in *Input[K]) put(parts ...string) {
	for _, p := range parts {
		if in.err == nil {
			_, in.err = in.w.WriteString(p)
		}
	}
	if in.err == nil {
		in.err = in.w.WriteByte('\n')
	}
	in.line++
}

func (in *Input[K]) belongs(owner K) { in.owners = append(in.owners, owned[K]{in.line + 1, owner}) }

// Owner returns whose line n is; the zero K for nobody's.
func (in *Input[K]) Owner(n int) K {
	var nobody K
	at := sort.Search(len(in.owners), func(i int) bool { return in.owners[i].first > n }) - 1
	if n <= 0 || at < 0 {
		return nobody
	}
	return in.owners[at].owner
}

// Write writes sections for a store.
func (in *Input[K]) Write(w *bufio.Writer, store iptables.Store, sections []*Section[K]) error {
	in.w, in.line, in.owners, in.Rules = w, 0, nil, map[iptables.Table]int{}
	for _, s := range sections {
		if !s.Empty() {
			in.section(s, store)
		}
	}
	return in.err
}

// manyChains is how many new chains a legacy table gets in a commit of their own:
// iptables finds a chain by a search in its index, and it only has one for chains
// that were there when it read the table.
const manyChains = 1000

func (in *Input[K]) section(s *Section[K], store iptables.Store) {
	var nobody K
	in.belongs(nobody)
	// Both stores keep chains in a sorted list; legacy finds a place from its end, nft
	// from its beginning.
	slices.SortFunc(s.Flush, Chain.Compare)
	if store == iptables.NFT {
		slices.Reverse(s.Flush)
	}
	in.put("*", string(s.Table))
	for _, c := range s.Flush {
		in.put(":", c.String(), " - [0:0]")
	}
	if store == iptables.Legacy && len(s.Flush) > manyChains {
		in.put("COMMIT")
		in.put("*", string(s.Table))
	}
	for _, c := range s.Delete {
		in.put(":", c.String(), " - [0:0]")
	}
	if s.Owned != nil {
		for owner, set := range s.Owned {
			in.belongs(owner)
			in.set(set, s)
		}
	}
	in.belongs(nobody)
	if s.Shared != nil {
		in.set(s.Shared, s)
	}
	for _, j := range s.Insert {
		in.put("-I ", j.From, " ", j.Rule)
	}
	for _, j := range s.Remove {
		in.put("-D ", j.From, " ", j.Rule)
	}
	for _, c := range s.Delete {
		in.put("-X ", c.String())
	}
	in.put("COMMIT")
}

// set writes the rules of those chains that the section rewrites.
func (in *Input[K]) set(set *Set, s *Section[K]) {
	for _, c := range set.Chains {
		if c.Chain.Table() != s.Table || !s.Rewrites(c.Chain) || in.err != nil {
			continue
		}
		_, in.err = in.w.Write(set.Text(c))
		in.line += c.Rules
		in.Rules[s.Table] += c.Rules
	}
}
