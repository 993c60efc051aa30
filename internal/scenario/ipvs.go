package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/flow"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// virtualServer is what `ipvsadm --save --numeric` says of one.
type virtualServer struct {
	scheduler  string
	persistent int // seconds; 0: not
	weights    map[netip.AddrPort]int
}

// virtualID identifies a virtual server.
type virtualID struct {
	proto lab.Proto
	addr  netip.AddrPort
}

// parseIPVS reads the output of `ipvsadm --save --numeric`.
func parseIPVS(text string) (map[virtualID]*virtualServer, error) {
	out := map[virtualID]*virtualServer{}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) < 3 || words[0] != "-A" && words[0] != "-a" {
			continue
		}
		proto, ok := map[string]lab.Proto{"-t": lab.TCP, "-u": lab.UDP, "--sctp-service": lab.SCTP}[words[1]]
		if !ok {
			continue // by firewall mark
		}
		addr, err := netip.ParseAddrPort(words[2])
		if err != nil {
			return nil, fmt.Errorf("virtual server in %q: %w", line, err)
		}
		id := virtualID{proto, addr}
		if words[0] == "-A" {
			out[id] = &virtualServer{weights: map[netip.AddrPort]int{}}
		}
		v := out[id]
		if v == nil {
			return nil, fmt.Errorf("real server without virtual server in %q", line)
		}
		if err := v.options(words[3:]); err != nil {
			return nil, fmt.Errorf("%w in %q", err, line)
		}
	}
	return out, nil
}

func (v *virtualServer) options(words []string) error {
	var real netip.AddrPort
	weight := 1
	for i, w := range words {
		value := ""
		if i+1 < len(words) {
			value = words[i+1]
		}
		var err error
		switch w {
		case "-s":
			v.scheduler = value
		case "-p":
			v.persistent, err = strconv.Atoi(value)
		case "-r":
			real, err = netip.ParseAddrPort(value)
		case "-w":
			weight, err = strconv.Atoi(value)
		}
		if err != nil {
			return fmt.Errorf("option %s: %w", w, err)
		}
	}
	if real.IsValid() {
		v.weights[real] = weight
	}
	return nil
}

// ipvs checks PROTO ADDR:PORT [scheduler=S] [servers=N] [persistent=T]
// [weight:IP=W] | absent.
func (k *kernel) ipvs(args []string) error {
	if len(args) < 2 {
		return world.Usagef("want PROTO ADDR:PORT [scheduler=S] [servers=N] [persistent=T] [weight:IP=W] | absent")
	}
	proto, err := lab.ParseProto(args[0])
	if err != nil {
		return world.Usagef("%v", err)
	}
	to, err := k.w.Targets(args[1])
	if err != nil {
		return err
	}
	for _, t := range to {
		err := flow.Eventually(flow.Settle, func() error {
			stdout, stderr, err := k.run(k.w.Node(), "", nil, []string{"ipvsadm", "--save", "--numeric"})
			if err != nil {
				return flow.Final(fmt.Errorf("read virtual servers: %w: %s", err, stderr))
			}
			all, err := parseIPVS(string(stdout))
			if err != nil {
				return flow.Final(err)
			}
			return all[virtualID{proto, t.Addr}].compare(args[2:], k.w.Families == world.Dual && t.V6)
		})
		if err != nil {
			return fmt.Errorf("virtual server %s %s: %w", proto, t.Addr, err)
		}
	}
	return nil
}

// compare checks the properties; mapped says that addresses in them stand for
// their counterparts.
func (v *virtualServer) compare(props []string, mapped bool) error {
	if len(props) == 1 && props[0] == "absent" {
		if v != nil {
			return errors.New("is there")
		}
		return nil
	}
	if v == nil {
		return errors.New("is not there")
	}
	for _, p := range props {
		k, want, _ := strings.Cut(p, "=")
		var have string
		switch {
		case k == "scheduler":
			have = v.scheduler
		case k == "servers":
			have = strconv.Itoa(len(v.weights))
		case k == "persistent":
			have, want = strconv.Itoa(v.persistent), strings.TrimSuffix(want, "s")
		case strings.HasPrefix(k, "weight:"):
			var err error
			if have, err = v.weightOf(strings.TrimPrefix(k, "weight:"), mapped); err != nil {
				return err
			}
		default:
			return world.Usagef("%q: want scheduler=, servers=, persistent=, weight:IP= or absent", p)
		}
		if have != want {
			return fmt.Errorf("%s is %s, want %s", k, have, want)
		}
	}
	return nil
}

func (v *virtualServer) weightOf(ip string, mapped bool) (string, error) {
	a, err := netip.ParseAddr(strings.Trim(ip, "[]"))
	if err != nil {
		return "", world.Usagef("weight of %q: %v", ip, err)
	}
	if mapped && a.Is4() {
		if a, err = world.Counterpart(a); err != nil {
			return "", err
		}
	}
	for real, w := range v.weights {
		if real.Addr() == a {
			return strconv.Itoa(w), nil
		}
	}
	return "absent", nil
}
