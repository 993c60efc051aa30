package demo

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// request is one kind of request: from one host to one frontend.
type request struct {
	id    plan.ID
	from  string
	to    netip.AddrPort
	want  plan.Result
	names map[netip.Addr]string // of the endpoints
	times int
}

// answers counts who answered, and how requests without an answer ended.
type answers map[string]int

func (a answers) String() string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(a)) {
		out = append(out, fmt.Sprintf("%s %d", name, a[name]))
	}
	return strings.Join(out, ", ")
}

// requestsOf are requests to every frontend: from a pod and the node, and from
// outside to those that outside hosts can reach.
func requestsOf(p *plan.Plan) []request {
	names := map[netip.Addr]string{}
	for _, e := range endpointsOf(p) {
		names[e.addr] = e.name
	}
	var out []request
	for _, id := range slices.SortedFunc(maps.Keys(p.Services), plan.ID.Compare) {
		if id.Protocol == plan.SCTP && !lab.HasSCTP() {
			continue
		}
		for _, f := range p.Services[id].Frontends {
			for _, from := range []string{clientHost, nodeHost, outsideHost} {
				if from == outsideHost && f.Kind == plan.ClusterIP {
					continue // nobody outside has a route to it
				}
				r := request{id: id, from: from, to: target(f, id.Family), names: names}
				r.want = plan.Eval(p, plan.Packet{Proto: id.Protocol, Src: r.source(), Dst: r.to, In: r.in()})
				r.times = 20 * max(1, len(r.want.Endpoints))
				if r.want.Outcome == plan.Dropped {
					r.times = 1 // each takes its time
				}
				out = append(out, r)
			}
		}
	}
	return out
}

func (r request) source() netip.Addr {
	for _, a := range addrsOf(r.from) {
		if a.Is4() == r.to.Addr().Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// in is the node's interface that the request arrives on.
func (r request) in() string {
	return map[string]string{clientHost: "cni0", nodeHost: "", outsideHost: "eth0"}[r.from]
}

// send sends the requests one after the other.
func (r request) send(ctx context.Context, network *lab.Lab) answers {
	have := answers{}
	for range r.times {
		a, err := r.sendOne(ctx, network.Host(r.from))
		if err != nil {
			have["("+lab.OutcomeOf(err).String()+")"]++
			continue
		}
		have[a.Server]++
	}
	return have
}

func (r request) sendOne(ctx context.Context, from *lab.Host) (lab.Answer, error) {
	const patience = time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	flow, err := from.Dial(ctx, lab.Dialing{Proto: lab.Proto(r.id.Protocol), To: r.to})
	if err != nil {
		return lab.Answer{}, err
	}
	defer func() { _ = flow.Close() }()
	return flow.Ask(patience)
}

// judge compares answers with the plan and returns what is wrong, "" if nothing.
func (r request) judge(have answers) string {
	switch r.want.Outcome {
	case plan.Refused:
		return only(have, "(refused)")
	case plan.Dropped:
		return only(have, "(dropped)")
	case plan.Pass:
		return "the plan does not serve it"
	}
	var expected []string
	for _, e := range r.want.Endpoints {
		expected = append(expected, r.names[e.Addr.Addr()])
	}
	for name := range have {
		if !slices.Contains(expected, name) {
			return "only " + strings.Join(expected, ", ") + " should answer"
		}
	}
	// With affinity one client has one endpoint. Without, an even choice among n
	// misses one in 20 n requests with a probability below n times 2e-9.
	if r.want.Affinity == 0 && len(have) < len(expected) {
		return "all of " + strings.Join(expected, ", ") + " should answer"
	}
	return ""
}

func only(have answers, outcome string) string {
	if len(have) == 1 && have[outcome] > 0 {
		return ""
	}
	return "want " + outcome
}

// showKernel prints what the kernel holds for one Service: the one with most
// endpoints.
func (d Demo) showKernel(node *lab.Host) error {
	p := d.Plan
	var shown plan.ID
	most := -1
	for _, id := range slices.SortedFunc(maps.Keys(p.Services), plan.ID.Compare) {
		if n := len(p.Services[id].Pools[plan.Cluster]); n > most {
			shown, most = id, n
		}
	}
	command, lines, err := kernelLines(node, d.Mode, shown)
	if err != nil {
		return err
	}
	d.say("\nWhat the kernel holds for %s (from %s):", shown, command)
	for _, l := range lines {
		d.say("  %s", l)
	}
	return nil
}

// kernelLines returns the lines of a listing that belong to a Service port, as
// people look at them with the kernel's own tools.
func kernelLines(node *lab.Host, mode string, id plan.ID) (command string, lines []string, err error) {
	family, lead := "ip", chainLines
	if id.Family == plan.IPv6 {
		family = "ip6"
	}
	candidates := [][]string{{family + "tables-nft-save"}, {family + "tables-legacy-save"}, {family + "tables-save"}}
	switch mode {
	case "nftables":
		candidates, lead = [][]string{{"nft", "list", "table", family, "svcproxy"}}, elementLines
	case "userspace":
		candidates, lead = [][]string{{"nft", "list", "table", family, "svcproxy-userspace"}}, elementLines
	}
	for _, c := range candidates {
		var out bytes.Buffer
		cmd := exec.Command(c[0], c[1:]...)
		cmd.Stdout = &out
		if err := node.Start(cmd); err != nil {
			continue // not installed
		}
		if err := cmd.Wait(); err != nil {
			return "", nil, fmt.Errorf("list the kernel's rules with %s: %w", c[0], err)
		}
		if lines = lead(out.String(), id.String()); len(lines) > 0 {
			return strings.Join(c, " "), lines, nil
		}
	}
	return "", nil, fmt.Errorf("no listing of the kernel's rules names %s", id)
}

// chainLines returns the rules of an iptables-save listing that name a Service in
// their comment, and those of the chains that these lead to.
func chainLines(listing, service string) []string {
	wanted := map[string]bool{}
	var out []string
	for again := true; again; {
		again = false
		out = out[:0]
		for line := range strings.Lines(listing) {
			line = strings.TrimSpace(line)
			f := strings.Fields(line)
			if len(f) < 2 || f[0] != "-A" {
				continue
			}
			named := strings.Contains(line, `"`+service+" ") || strings.Contains(line, `"`+service+`"`) || strings.Contains(line, "--comment "+service+" ")
			if !named && !wanted[f[1]] {
				continue
			}
			out = append(out, line)
			for i, word := range f[:len(f)-1] {
				target := f[i+1]
				if (word == "-j" || word == "-g") && isServiceChain(target) && !wanted[target] {
					wanted[target], again = true, true
				}
			}
		}
	}
	return out
}

// elementLines returns the elements in a listing by nft that name a Service.
func elementLines(listing, service string) []string {
	var out []string
	for line := range strings.Lines(listing) {
		line = strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(line), "elements = { "), " }")
		if strings.Contains(line, `comment "`+service+`"`) {
			out = append(out, strings.TrimSuffix(line, ","))
		}
	}
	return out
}

// isServiceChain tells the chains of one Service from those that all share.
func isServiceChain(name string) bool {
	for _, prefix := range []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}
