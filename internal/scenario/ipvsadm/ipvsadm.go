// Package ipvsadm reads the kernel's virtual servers as ipvsadm prints them and compares
// them with what a script says.
package ipvsadm

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// Server is what `ipvsadm --save --numeric` says of one.
type Server struct {
	scheduler  string
	persistent int // seconds; 0: not
	weights    map[netip.AddrPort]int
}

// ID identifies a virtual server.
type ID struct {
	Proto lab.Proto
	Addr  netip.AddrPort
}

// Parse reads the output of `ipvsadm --save --numeric`.
func Parse(text string) (map[ID]*Server, error) {
	out := map[ID]*Server{}
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
		id := ID{proto, addr}
		if words[0] == "-A" {
			out[id] = &Server{weights: map[netip.AddrPort]int{}}
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

func (v *Server) options(words []string) error {
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

// Compare checks the properties; mapped says that addresses in them stand for
// their counterparts.
func (v *Server) Compare(props []string, mapped bool) error {
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
		var err error
		switch {
		case k == "scheduler":
			have = v.scheduler
		case k == "servers":
			have = strconv.Itoa(len(v.weights))
		case k == "persistent":
			have = strconv.Itoa(v.persistent)
			want, err = seconds(want)
		case strings.HasPrefix(k, "weight:"):
			have, err = v.weightOf(strings.TrimPrefix(k, "weight:"), mapped)
		default:
			err = world.Usagef("%q: want scheduler=, servers=, persistent=, weight:IP= or absent", p)
		}
		if err != nil {
			return err
		}
		if have != want {
			return fmt.Errorf("%s is %s, want %s", k, have, want)
		}
	}
	return nil
}

// seconds reads a time, as a number of seconds or with units.
func seconds(s string) (string, error) {
	if _, err := strconv.Atoi(s); err == nil {
		return s, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return "", world.Usagef("persistent=%s: want seconds, or a time with its unit", s)
	}
	return strconv.Itoa(int(d.Seconds())), nil
}

func (v *Server) weightOf(ip string, mapped bool) (string, error) {
	a, err := netip.ParseAddr(strings.Trim(ip, "[]"))
	if err != nil {
		return "", world.Usagef("weight of %q: %v", ip, err)
	}
	if mapped && a.Is4() {
		a = world.Counterpart(a)
	}
	for real, w := range v.weights {
		if real.Addr() == a {
			return strconv.Itoa(w), nil
		}
	}
	return "absent", nil
}
