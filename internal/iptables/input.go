package iptables

import (
	"bufio"
	"cmp"
	"slices"
	"sort"
	"strings"

	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// section is what one commit does to a table.
type section struct {
	table    sys.Table
	flush    []chainID            // created, or emptied before rules are added
	services []*plan.ServicePort  // whose chains among flush are written
	shared   *rules               // whose chains among flush are written
	insert   []jump               // put in front of built-in chains
	remove   []string             // "CHAIN RULE": taken out of built-in chains
	deletes  []chainID            // emptied and removed
	rewrite  map[chainID]struct{} // flush as a set
}

func (s *section) empty() bool {
	return len(s.flush)+len(s.insert)+len(s.remove)+len(s.deletes) == 0
}

// input writes sections in iptables-restore's language and remembers which line is
// whose.
type input struct {
	w      *bufio.Writer
	r      *renderer
	line   int
	owners []owned
	rules  map[sys.Table]int // written
	err    error
}

// owned says that the lines from first on belong to a Service port; the zero ID
// stands for nobody's.
type owned struct {
	first int
	id    plan.ID
}

func (in *input) put(parts ...string) {
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

func (in *input) belongs(id plan.ID) { in.owners = append(in.owners, owned{in.line + 1, id}) }

// owner returns whose line n is.
func (in *input) owner(n int) (plan.ID, bool) {
	at := sort.Search(len(in.owners), func(i int) bool { return in.owners[i].first > n }) - 1
	if n <= 0 || at < 0 || in.owners[at].id == (plan.ID{}) {
		return plan.ID{}, false
	}
	return in.owners[at].id, true
}

// manyChains is how many new chains a legacy table gets in a commit of their own:
// iptables finds a chain by a search in its index, and it only has one for chains
// that were there when it read the table.
const manyChains = 1000

// section writes one commit.
func (in *input) section(s *section, store sys.Store) {
	if s.empty() {
		return
	}
	in.belongs(plan.ID{})
	in.order(s.flush, store)
	in.put("*", string(s.table))
	for _, c := range s.flush {
		in.put(":", c.String(), " - [0:0]")
	}
	if store == sys.Legacy && len(s.flush) > manyChains {
		in.put("COMMIT")
		in.put("*", string(s.table))
	}
	for _, c := range s.deletes {
		in.put(":", c.String(), " - [0:0]")
	}
	for _, sp := range s.services {
		in.belongs(sp.ID)
		in.chains(in.r.service(sp), s)
	}
	in.belongs(plan.ID{})
	if s.shared != nil {
		in.chains(s.shared, s)
	}
	for _, j := range s.insert {
		in.put("-I ", j.from, " ", j.rule())
	}
	for _, rule := range s.remove {
		in.put("-D ", rule)
	}
	slices.SortFunc(s.deletes, func(a, b chainID) int { return strings.Compare(a.String(), b.String()) })
	for _, c := range s.deletes {
		in.put("-X ", c.String())
	}
	in.put("COMMIT")
}

// order sorts chains as the store likes them: both keep chains in a sorted list,
// legacy finds a place from its end, nft from its beginning.
func (in *input) order(chains []chainID, store sys.Store) {
	slices.SortFunc(chains, func(a, b chainID) int {
		if store == sys.NFT {
			a, b = b, a
		}
		return cmp.Compare(string(a.name[:]), string(b.name[:]))
	})
}

// chains writes the rules of those of r's chains that the section rewrites.
func (in *input) chains(r *rules, s *section) {
	for _, c := range r.chains {
		if _, ok := s.rewrite[c.id]; !ok || in.err != nil {
			continue
		}
		text := r.text(c)
		if _, err := in.w.Write(text); err != nil {
			in.err = err
		}
		in.line += c.rules
		in.rules[s.table] += c.rules
	}
}
