package iptables

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
	sys "github.com/svcproxy/svcproxy/internal/sys/iptables"
	"github.com/svcproxy/svcproxy/internal/sys/iptables/rule"
)

// walker carries packets through the rules of a fake, following every random
// branch with its probability.
type walker struct {
	t      testing.TB
	node   *plan.Node
	chains map[sys.Table]map[string][]parsedRule
	most   int // the most rules that one packet met
}

type parsedRule struct {
	options []option
	target  string
	goTo    bool
	args    string
}

type option struct {
	name, value string
	not         bool
}

// walked is a packet under way.
type walked struct {
	plan.Packet
	orig   netip.AddrPort
	mark   uint64
	chance float64
	met    int
}

// end is how a packet left a chain.
type end struct {
	walked
	verdict string // ACCEPT, DROP, REJECT, DNAT; "" for the chain's end
}

func newWalker(t testing.TB, n *plan.Node, tables sys.Tables) *walker {
	t.Helper()
	w := &walker{t: t, node: n, chains: map[sys.Table]map[string][]parsedRule{}}
	for _, table := range []sys.Table{sys.NAT, sys.Filter} {
		chains := map[string][]parsedRule{}
		err := tables.Save(context.Background(), table, func(line []byte) error {
			s := string(line)
			if s[0] == ':' {
				name, _, _ := strings.Cut(s[1:], " ")
				chains[name] = nil
			}
			if rest, ok := strings.CutPrefix(s, "-A "); ok {
				name, text, _ := strings.Cut(rest, " ")
				chains[name] = append(chains[name], parseRule(text))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		w.chains[table] = chains
	}
	return w
}

func parseRule(line string) parsedRule {
	var p parsedRule
	words := rule.Tokens(line)
	not := false
	for i := 0; i < len(words); i++ {
		switch word := words[i]; {
		case word == "!":
			not = true
		case word == "-j" || word == "-g":
			p.target, p.goTo = words[i+1], word == "-g"
			p.args = strings.Join(words[i+2:], " ")
			return p
		case word == "-m":
			i++
		case word[0] == '-':
			o := option{name: word, not: not}
			for i+1 < len(words) && words[i+1][0] != '-' && words[i+1] != "!" {
				i++
				o.value += words[i]
			}
			p.options = append(p.options, o)
			not = false
		}
	}
	return p
}

// chain returns all ways in which the packet may leave a chain.
func (w *walker) chain(t sys.Table, name string, pkt walked) []end {
	rules, ok := w.chains[t][name]
	if !ok {
		w.t.Fatalf("no chain %s in table %s", name, t)
	}
	var out []end
	live := []walked{pkt}
	for i := range rules {
		var next []walked
		for _, p := range live {
			p.met++
			w.most = max(w.most, p.met)
			yes, no := w.match(&rules[i], p)
			if no.chance > 0 {
				next = append(next, no)
			}
			if yes.chance > 0 {
				done, on := w.target(t, &rules[i], yes)
				out, next = append(out, done...), append(next, on...)
			}
		}
		live = next
	}
	for _, p := range live {
		out = append(out, end{walked: p})
	}
	return out
}

// target carries out a rule's target: how packets end, and which go on behind it.
func (w *walker) target(t sys.Table, r *parsedRule, p walked) (done []end, on []walked) {
	switch r.target {
	case "":
		return nil, []walked{p}
	case "ACCEPT", "DROP", "REJECT":
		return []end{{p, r.target}}, nil
	case "RETURN":
		return []end{{p, ""}}, nil
	case "MARK":
		value, mask, _ := strings.Cut(strings.TrimPrefix(r.args, "--set-xmark "), "/")
		v, _ := strconv.ParseUint(value, 0, 32)
		m, _ := strconv.ParseUint(mask, 0, 32)
		p.mark = p.mark&^m ^ v
		return nil, []walked{p}
	case "MASQUERADE":
		return []end{{p, "MASQUERADE"}}, nil
	case "DNAT":
		p.Dst = netip.MustParseAddrPort(strings.TrimPrefix(r.args, "--to-destination "))
		return []end{{p, "DNAT"}}, nil
	}
	for _, e := range w.chain(t, r.target, p) {
		if e.verdict == "" && !r.goTo {
			on = append(on, e.walked)
		} else {
			done = append(done, e)
		}
	}
	return done, on
}

// match splits a packet into the part that a rule matches and the rest.
func (w *walker) match(r *parsedRule, p walked) (yes, no walked) {
	yes, no = p, p
	no.chance = 0
	for _, o := range r.options {
		if o.name == "--probability" {
			share, err := strconv.ParseFloat(o.value, 64)
			if err != nil {
				w.t.Fatal(err)
			}
			yes.chance, no.chance = p.chance*share, p.chance*(1-share)
			continue
		}
		if w.holds(o, p) == o.not {
			yes.chance, no.chance = 0, p.chance
			return yes, no
		}
	}
	return yes, no
}

func (w *walker) holds(o option, p walked) bool {
	prefix := func() netip.Prefix {
		if !strings.Contains(o.value, "/") {
			a := netip.MustParseAddr(o.value)
			return netip.PrefixFrom(a, a.BitLen())
		}
		return netip.MustParsePrefix(o.value)
	}
	inRange := func(port uint16) bool {
		first, last, ranged := strings.Cut(o.value, ":")
		if !ranged {
			last = first
		}
		a, _ := strconv.Atoi(first)
		b, _ := strconv.Atoi(last)
		return int(port) >= a && int(port) <= b
	}
	switch o.name {
	case "-s":
		return prefix().Contains(p.Src)
	case "-d":
		return prefix().Contains(p.Dst.Addr())
	case "-i":
		if name, ok := strings.CutSuffix(o.value, "+"); ok {
			return p.In != "" && strings.HasPrefix(p.In, name)
		}
		return p.In == o.value
	case "-p":
		return o.value == protoName(p.Proto)
	case "--dport":
		return inRange(p.Dst.Port())
	case "--ctorigdst":
		return prefix().Contains(p.orig.Addr())
	case "--ctorigdstport":
		return inRange(p.orig.Port())
	case "--src-type":
		return w.local(p.Src)
	case "--dst-type":
		return w.local(p.Dst.Addr())
	case "--ctstate":
		return slices.ContainsFunc(strings.Split(o.value, ","), func(s string) bool {
			return s == "NEW" || s == "DNAT" && p.orig != p.Dst
		})
	case "--mark":
		value, mask, _ := strings.Cut(o.value, "/")
		v, _ := strconv.ParseUint(value, 0, 32)
		m, _ := strconv.ParseUint(mask, 0, 32)
		return p.mark&m == v
	case "--bytecode":
		return runBPF(w.t, o.value, p.Src, p.Dst.Addr())
	case "--comment", "--set", "--name", "--seconds", "--reap", "--mask", "--rsource", "--mode":
		return true
	case "--rcheck":
		return false // nobody has been here before
	}
	w.t.Fatalf("the walker does not know %s", o.name)
	return false
}

func (w *walker) local(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(w.node.Addrs, a)
}

// fate is what happens to a packet: an outcome, and shares by "endpoint+snat".
type fate struct {
	outcome plan.Outcome
	shares  map[string]float64
}

// walk carries one packet through both tables.
func (w *walker) walk(pkt plan.Packet) fate {
	start := walked{Packet: pkt, orig: pkt.Dst, chance: 1}
	first, then := "PREROUTING", "FORWARD"
	if pkt.In == "" {
		first, then = "OUTPUT", "OUTPUT"
	}
	out := fate{shares: map[string]float64{}}
	seen := map[plan.Outcome]float64{}
	for _, e := range w.chain(sys.NAT, first, start) {
		chain := then
		if pkt.In != "" && w.local(e.Dst.Addr()) {
			chain = "INPUT"
		}
		for _, f := range w.chain(sys.Filter, chain, e.walked) {
			switch {
			case f.verdict == "DROP":
				seen[plan.Dropped] += f.chance
			case f.verdict == "REJECT":
				seen[plan.Refused] += f.chance
			case e.verdict == "DNAT":
				seen[plan.Forwarded] += f.chance
				out.shares[w.arrival(f.walked)] += f.chance
			default:
				seen[plan.Pass] += f.chance
			}
		}
	}
	if len(seen) != 1 {
		w.t.Errorf("%v: mixed outcomes %v", pkt, seen)
	}
	for o := range seen {
		out.outcome = o
	}
	return out
}

// arrival is where a translated packet goes and as whom.
func (w *walker) arrival(p walked) string {
	for _, e := range w.chain(sys.NAT, chainPostrouting, p) {
		if e.verdict == "MASQUERADE" {
			return p.Dst.String() + "+snat"
		}
	}
	return p.Dst.String()
}

// runBPF runs a program of classic BPF, as iptables writes it, on the header of a
// packet from src to dst, and reports whether it matches.
func runBPF(t testing.TB, program string, src, dst netip.Addr) bool {
	t.Helper()
	at := 12
	if src.Is6() {
		at = 8
	}
	header := slices.Concat(make([]byte, at), src.AsSlice(), dst.AsSlice())
	var a, x uint32
	lines := strings.Split(program, ",")[1:]
	for pc := 0; pc < len(lines); pc++ {
		var code, jt, jf int
		var k uint32
		if _, err := fmt.Sscan(lines[pc], &code, &jt, &jf, &k); err != nil {
			t.Fatalf("program %q, instruction %d: %v", program, pc, err)
		}
		switch code {
		case 0x20: // load a word
			a = binary.BigEndian.Uint32(header[k:])
		case 0x07: // keep it
			x = a
		case 0x1d: // jump if equal
			pc += map[bool]int{true: jt, false: jf}[a == x]
		case 0x06:
			return k != 0
		default:
			t.Fatalf("program %q: the walker does not know instruction %d", program, code)
		}
	}
	t.Fatalf("program %q does not return", program)
	return false
}

// wantFate is what the plan says.
func wantFate(p *plan.Plan, pkt plan.Packet) fate {
	r := plan.Eval(p, pkt)
	out := fate{outcome: r.Outcome, shares: map[string]float64{}}
	for _, e := range r.Endpoints {
		key := e.Addr.String()
		if e.SNAT {
			key += "+snat"
		}
		out.shares[key] += e.Share
	}
	return out
}

func (f fate) equal(o fate) bool {
	if f.outcome != o.outcome || len(f.shares) != len(o.shares) {
		return false
	}
	for k, v := range f.shares {
		if math.Abs(v-o.shares[k]) > 1e-6 {
			return false
		}
	}
	return true
}

// packetsFor lists packets that may tell something about a plan.
func packetsFor(rng *rand.Rand, p *plan.Plan, w world) []plan.Packet {
	var dsts []netip.AddrPort
	var protos []plan.Protocol
	add := func(pr plan.Protocol, a netip.Addr, port uint16) {
		protos, dsts = append(protos, pr), append(dsts, netip.AddrPortFrom(a, port))
	}
	sources := map[netip.Addr]string{
		w.at("pod", 250): "cni0", w.outside: "eth0", w.at("other", 200): "eth0", w.node[0]: "",
	}
	for _, sp := range p.Services {
		if sp.ID.Family != w.family {
			continue
		}
		for _, f := range sp.Frontends {
			if f.Kind == plan.NodePort {
				for _, a := range p.Node.Addrs {
					if plan.FamilyOf(a) == w.family {
						add(sp.ID.Protocol, a, f.Port)
					}
				}
				continue
			}
			add(sp.ID.Protocol, f.Addr, f.Port)
			add(sp.ID.Protocol, f.Addr, f.Port+1000)
		}
		for _, e := range sp.Pools[plan.Cluster] {
			if rng.IntN(6) == 0 { // an endpoint as the client, perhaps its own
				sources[e.Addr.Addr()] = map[bool]string{true: "cni0", false: "eth0"}[e.OnNode]
			}
		}
	}
	add(plan.TCP, w.at("service", 250), 80)
	add(plan.TCP, w.node[0], 22)
	add(plan.TCP, w.outside, 80)
	var out []plan.Packet
	for i, dst := range dsts {
		for src, in := range sources {
			out = append(out, plan.Packet{Proto: protos[i], Src: src, Dst: dst, In: in})
		}
	}
	return out
}

// Packets meet in the rules what the plan says about them, whether endpoints have
// chains of their own or not.
func TestPacketsAsPlanned(t *testing.T) {
	for _, many := range []int{manyEndpoints, always} {
		t.Run(map[bool]string{true: "compact", false: "classic"}[many < 0], func(t *testing.T) { testPacketsAsPlanned(t, many) })
	}
}

func testPacketsAsPlanned(t *testing.T, many int) {
	for _, f := range plan.Families {
		t.Run(f.String(), func(t *testing.T) {
			for seed := range uint64(2 * localKinds) {
				rng := rand.New(rand.NewPCG(seed, uint64(f)))
				p := randomPlan(rng, nil, f)
				for range 12 {
					p = randomPlan(rng, p, f)
				}
				node := *p.Node
				node.Local = map[plan.Family]plan.LocalTraffic{f: localTraffic(testWorld(f), int(seed)%localKinds)}
				p.Node = &node
				b, fakes := onFakes(t, sys.Legacy, f)
				setMany(t, b, many)
				mustApply(t, b, plan.Update{Plan: p})
				w := newWalker(t, p.Node, fakes[f])
				for _, pkt := range packetsFor(rng, p, testWorld(f)) {
					if have, want := w.walk(pkt), wantFate(p, pkt); !have.equal(want) {
						t.Errorf("seed %d, local traffic %+v, packet %+v:\nhave %v\nwant %v (%v)", seed, p.Node.Local[f], pkt, have, want, plan.Eval(p, pkt).Frontend)
					}
				}
				if t.Failed() {
					t.Log(fmt.Sprint(fakes[f]))
					t.FailNow()
				}
			}
		})
	}
}
