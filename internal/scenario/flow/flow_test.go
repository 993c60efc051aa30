package flow

import (
	"errors"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

func mustParse(t *testing.T, line string) *Spec {
	t.Helper()
	f, err := Parse(world.New(world.AsWritten), strings.Fields(line))
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return f
}

func TestParse(t *testing.T) {
	f := mustParse(t, "sticky within=5s n=7 sport=40000 pod:probe udp 10.62.0.40:53 -> a|b src=client share=a:0.5,b:0.5~0.1")
	switch {
	case !f.Sticky, f.Within != 5*time.Second, f.n != 7, f.Sport != 40000:
		t.Errorf("flags: %+v", f)
	case f.From.Name != "probe", f.Proto != lab.UDP, len(f.To) != 1:
		t.Errorf("ends: %+v", f)
	case f.Want.End != lab.Answered, len(f.Want.Servers) != 2, f.Want.Src != "client", f.Want.Share["b"] != 0.5, f.Want.Within != 0.1:
		t.Errorf("outcome: %+v", f.Want)
	}
	for line, want := range map[string]string{
		"probe tcp 10.62.0.20:80":                            "->",
		"probe tcp 10.62.0.20:80 ->":                         "->",
		"probe icmp 10.62.0.20:80 -> a":                      "icmp",
		"n=0 probe tcp 10.62.0.20:80 -> a":                   "positive",
		"within=soon probe tcp 10.62.0.20:80 -> a":           "soon",
		"probe tcp 10.62.0.20:80 -> a||b":                    "empty",
		"probe tcp 10.62.0.20:80 -> a src=nobody":            "src",
		"probe tcp 10.62.0.20:80 -> a share=a:1":             "TOLERANCE",
		"probe tcp 10.62.0.20:80 -> a share=b:1~0.1":         "b:1",
		"probe tcp 10.62.0.20:80 -> refused src=client":      "nobody answers",
		"probe tcp 10.62.0.20:80 -> a colour=red":            "src= or share=",
		"stranger tcp 10.62.0.20:80 -> a":                    "stranger",
		"within=5s sticky probe tcp 10.62.0.20:http -> a":    "http",
		"probe tcp 10.62.0.20:80 -> a|b share=a:0.5,b:0.5~0": "tolerance",
	} {
		_, err := Parse(world.New(world.AsWritten), strings.Fields(line))
		if !world.IsUsage(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want one that says %q", line, err, want)
		}
	}
}

// TestAttempts: enough that a right proxy fails by chance less than once in a
// million checks.
func TestAttempts(t *testing.T) {
	for _, line := range []string{
		"probe tcp 10.62.0.20:80 -> a|b",
		"probe tcp 10.62.0.20:80 -> a|b|c|d|e|f|g|h",
		"probe tcp 10.62.0.20:80 -> a|b share=a:0.9,b:0.1~0.5",
	} {
		f := mustParse(t, line)
		if p := missed(f.Want.Servers, f.Want.Share, f.attempts()); p > 1e-6 {
			t.Errorf("%s: %d flows miss a server with probability %g", line, f.attempts(), p)
		}
	}
	f := mustParse(t, "probe tcp 10.62.0.20:80 -> a|b share=a:0.5,b:0.5~0.05")
	// Hoeffding's bound is coarser than the normal one, but it is no approximation.
	if p := 2 * math.Exp(-2*float64(f.attempts())*0.05*0.05); p > 1e-5 {
		t.Errorf("%d flows stray from their shares with probability up to %g", f.attempts(), p)
	}
	if n := mustParse(t, "n=3 probe tcp 10.62.0.20:80 -> a|b").attempts(); n != 3 {
		t.Errorf("n=3 makes %d flows", n)
	}
}

// That a router has no way is as good as a refusal only where nobody should answer.
func TestMeets(t *testing.T) {
	f := mustParse(t, "probe tcp 203.0.113.5:2222 -> refused")
	if f.Meets(lab.Unreachable, f.To[0]) {
		t.Error("nobody said that the node passes it on")
	}
	for passesOn, want := range map[bool]bool{false: false, true: true} {
		f.PassesOn = func(netip.AddrPort) bool { return passesOn }
		if f.Meets(lab.Unreachable, f.To[0]) != want || !f.Meets(lab.Refused, f.To[0]) || f.Meets(lab.Dropped, f.To[0]) || f.Meets(lab.Answered, f.To[0]) {
			t.Errorf("passed on: %t", passesOn)
		}
	}
	other := mustParse(t, "probe tcp 203.0.113.5:2222 -> dropped")
	other.PassesOn = func(netip.AddrPort) bool { return true }
	if other.Meets(lab.Unreachable, other.To[0]) {
		t.Error("it was to be dropped")
	}
}

func TestTally(t *testing.T) {
	client, node := netip.MustParseAddr("10.61.1.250"), netip.MustParseAddr("192.0.2.11")
	from := func(server string, seen netip.Addr) Sighting {
		return Sighting{End: lab.Answered, Answer: lab.Answer{Server: server, Seen: netip.AddrPortFrom(seen, 1024)}, local: client}
	}
	refused := Sighting{End: lab.Refused, err: errors.New("connection refused")}
	repeat := func(n int, s ...Sighting) (out []Sighting) {
		for range n {
			out = append(out, s...)
		}
		return out
	}
	a, b, snat := from("a", client), from("b", client), from("a", node)
	tests := []struct {
		line string
		seen []Sighting
		want string // "" passes
	}{
		{"probe tcp x:80 -> a|b", repeat(11, a, b), ""},
		{"probe tcp x:80 -> a|b", repeat(22, a), "b answered none"},
		{"probe tcp x:80 -> a", append(repeat(19, a), b), "flow 20 of 20 was answered by b"},
		{"probe tcp x:80 -> a", append(repeat(19, a), refused), "was refused"},
		{"probe tcp x:80 -> refused", repeat(3, refused), ""},
		{"probe tcp x:80 -> refused", append(repeat(2, refused), a), "want refused"},
		{"sticky probe tcp x:80 -> a|b", repeat(20, b), ""},
		{"sticky probe tcp x:80 -> a|b", append(repeat(19, b), a), "same server"},
		{"probe tcp x:80 -> a src=client", repeat(20, a), ""},
		{"probe tcp x:80 -> a src=client", append(repeat(19, a), snat), "src=client"},
		{"probe tcp x:80 -> a src=node", repeat(20, snat), ""},
		{"probe tcp x:80 -> a src=192.0.2.11", repeat(20, snat), ""},
		{"probe tcp x:80 -> a src=192.0.2.12", repeat(20, snat), "src=192.0.2.12"},
		{"n=100 probe tcp x:80 -> a|b share=a:0.5,b:0.5~0.1", repeat(50, a, b), ""},
		{"n=100 probe tcp x:80 -> a|b share=a:0.5,b:0.5~0.1", append(repeat(70, a), repeat(30, b)...), "0.700"},
		{"n=2 probe tcp x:80 -> a|b", repeat(2, a), ""}, // too few for both
	}
	for _, tt := range tests {
		f := mustParse(t, strings.Replace(tt.line, "x:80", "10.62.0.20:80", 1))
		tally := tally{flow: f, total: len(tt.seen), counts: map[string]int{}, nodeAddrs: []netip.Addr{node}}
		for _, s := range tt.seen {
			tally.add(s)
		}
		err := tally.result()
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.line, err, tt.want)
		}
	}
}

func TestEventually(t *testing.T) {
	n := 0
	if err := Eventually(time.Minute, func() error {
		if n++; n < 3 {
			return errors.New("not yet")
		}
		return nil
	}); err != nil || n != 3 {
		t.Errorf("error %v after %d calls, want none after 3", err, n)
	}
	n = 0
	stop := errors.New("never")
	if err := Eventually(time.Minute, func() error { n++; return Final(stop) }); !errors.Is(err, stop) || n != 1 {
		t.Errorf("error %v after %d calls, want the final one after 1", err, n)
	}
	if err := Eventually(0, func() error { return stop }); !errors.Is(err, stop) {
		t.Errorf("error %v, want the last one", err)
	}
}
