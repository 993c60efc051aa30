package lab

import (
	"bytes"
	"context"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// small is a router between a client and a node with one pod.
func small() Topology {
	a := netip.MustParseAddr
	p := netip.MustParsePrefix
	return Topology{
		Hosts: []HostSpec{
			{Name: "router", Forwards: true, TurnsBack: true, Addrs: []netip.Addr{a("192.0.2.1"), a("2001:db8:1::1")}},
			{Name: "alder", Forwards: true, OwnRun: true},
		},
		Links: []LinkSpec{{
			A: EndSpec{Host: "alder", Interface: "eth0", Addrs: []netip.Prefix{p("192.0.2.11/32"), p("2001:db8:1::11/128")}},
			B: EndSpec{Host: "router", Interface: "to-alder"},
		}},
		Routes: []RouteSpec{
			{Host: "alder", To: p("0.0.0.0/0"), Dev: "eth0", Via: a("192.0.2.1"), Src: a("192.0.2.11")},
			{Host: "alder", To: p("::/0"), Dev: "eth0", Via: a("2001:db8:1::1"), Src: a("2001:db8:1::11")},
			{Host: "router", To: p("192.0.2.11/32"), Dev: "to-alder", Src: a("192.0.2.1")},
			{Host: "router", To: p("2001:db8:1::11/128"), Dev: "to-alder", Src: a("2001:db8:1::1")},
			{Host: "router", To: p("0.0.0.0/0"), Dev: "to-alder", Via: a("192.0.2.11")},
			{Host: "router", To: p("::/0"), Dev: "to-alder", Via: a("2001:db8:1::11")},
		},
		Leaves: []LeafSpec{
			{Name: "web", Behind: "alder", Addrs: []netip.Addr{a("10.61.1.5"), a("2001:db8:61:1::5")},
				From: []netip.Addr{a("192.0.2.11"), a("2001:db8:1::11")}},
			{Name: "laptop", Behind: "router", Addrs: []netip.Addr{a("198.51.100.7"), a("2001:db8:51::7")}},
		},
	}
}

func mustBuild(t *testing.T) *Lab {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	l, err := Build(small())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func ask(h *Host, d Dialing) (Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	f, err := h.Dial(ctx, d)
	if err != nil {
		return Answer{}, err
	}
	defer f.Close()
	return f.Ask(time.Second)
}

func TestFlows(t *testing.T) {
	l := mustBuild(t)
	web, laptop, alder := l.Host("web"), l.Host("laptop"), l.Host("alder")
	for _, p := range []Proto{TCP, UDP} {
		if _, err := web.Serve("web", p, 8080); err != nil {
			t.Fatal(err)
		}
	}
	tests := []struct {
		from    *Host
		proto   Proto
		to      string
		outcome Outcome
		seen    string
	}{
		{laptop, TCP, "10.61.1.5:8080", Answered, "198.51.100.7"},
		{laptop, UDP, "10.61.1.5:8080", Answered, "198.51.100.7"},
		{laptop, TCP, "[2001:db8:61:1::5]:8080", Answered, "2001:db8:51::7"},
		{laptop, UDP, "[2001:db8:61:1::5]:8080", Answered, "2001:db8:51::7"},
		{alder, TCP, "10.61.1.5:8080", Answered, "192.0.2.11"},
		{alder, TCP, "[2001:db8:61:1::5]:8080", Answered, "2001:db8:1::11"},
		{web, TCP, "127.0.0.1:8080", Answered, "127.0.0.1"},
		{laptop, TCP, "10.61.1.5:8081", Refused, ""},
		{laptop, UDP, "10.61.1.5:8081", Refused, ""},
		{laptop, TCP, "[2001:db8:61:1::5]:8081", Refused, ""},
		{laptop, TCP, "10.62.0.20:80", Unreachable, ""},
		{laptop, TCP, "[2001:db8:62::20]:80", Unreachable, ""},
	}
	for _, tt := range tests {
		d := Dialing{Proto: tt.proto, To: netip.MustParseAddrPort(tt.to)}
		a, err := ask(tt.from, d)
		if have := OutcomeOf(err); have != tt.outcome {
			t.Errorf("%s from %s to %s: have %s (%v), want %s", tt.proto, tt.from.Name(), tt.to, have, err, tt.outcome)
			continue
		}
		if tt.outcome == Answered && (a.Server != "web" || a.Seen.Addr() != netip.MustParseAddr(tt.seen)) {
			t.Errorf("%s from %s to %s: answer %v, want web, seeing %s", tt.proto, tt.from.Name(), tt.to, a, tt.seen)
		}
	}
}

func TestSourcePortIsFreeAtOnce(t *testing.T) {
	l := mustBuild(t)
	if _, err := l.Host("web").Serve("web", TCP, 8080); err != nil {
		t.Fatal(err)
	}
	d := Dialing{Proto: TCP, To: netip.MustParseAddrPort("10.61.1.5:8080"), SourcePort: 40000}
	for range 20 {
		a, err := ask(l.Host("laptop"), d)
		if err != nil || a.Seen.Port() != 40000 {
			t.Fatalf("answer %v, error %v, want source port 40000", a, err)
		}
	}
}

func TestCutIsSilentAndJoinRestores(t *testing.T) {
	l := mustBuild(t)
	web, laptop := l.Host("web"), l.Host("laptop")
	if _, err := web.Serve("web", TCP, 8080); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"10.61.1.5:8080", "[2001:db8:61:1::5]:8080"} {
		d := Dialing{Proto: TCP, To: netip.MustParseAddrPort(to)}
		f, err := laptop.Dial(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Ask(time.Second); err != nil {
			t.Fatal(err)
		}
		if err := web.Cut("eth0"); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Ask(200 * time.Millisecond); OutcomeOf(err) != Dropped {
			t.Errorf("%s: open flow while cut: %v, want silence", to, err)
		}
		if _, err := ask(laptop, d); OutcomeOf(err) != Dropped {
			t.Errorf("%s: new flow while cut: %v, want silence", to, err)
		}
		if err := web.Join("eth0"); err != nil {
			t.Fatal(err)
		}
		if _, err := ask(laptop, d); err != nil {
			t.Errorf("%s: after join: %v", to, err)
		}
	}
}

func TestServerEnds(t *testing.T) {
	l := mustBuild(t)
	web, laptop := l.Host("web"), l.Host("laptop")
	s, err := web.Serve("web", TCP, 8080)
	if err != nil {
		t.Fatal(err)
	}
	d := Dialing{Proto: TCP, To: netip.MustParseAddrPort("10.61.1.5:8080")}
	f, err := laptop.Dial(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Ask(time.Second); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, err := f.Ask(time.Second); err == nil {
		t.Error("an open connection was answered after its server ended")
	}
	if _, err := ask(laptop, d); OutcomeOf(err) != Refused {
		t.Errorf("after the end: %v, want refused", err)
	}
	if s, err = web.Serve("again", TCP, 8080); err != nil {
		t.Fatalf("start again on the same port: %v", err)
	}
	defer s.Close()
	if a, err := ask(laptop, d); err != nil || a.Server != "again" {
		t.Errorf("after the restart: %v, %v", a, err)
	}
}

func TestAddresses(t *testing.T) {
	l := mustBuild(t)
	alder, laptop := l.Host("alder"), l.Host("laptop")
	if _, err := alder.Serve("alder", UDP, 53); err != nil {
		t.Fatal(err)
	}
	d := Dialing{Proto: UDP, To: netip.MustParseAddrPort("192.0.2.99:53")}
	if err := alder.AddAddr("eth0", netip.MustParsePrefix("192.0.2.99/32")); err != nil {
		t.Fatal(err)
	}
	if a, err := ask(laptop, d); err != nil || a.Server != "alder" {
		t.Errorf("added address: %v, %v", a, err)
	}
	if err := alder.DelAddr("eth0", netip.MustParseAddr("192.0.2.99")); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(laptop, d); err == nil {
		t.Error("the removed address still answers")
	}
}

func TestProgramsAndPrivateRun(t *testing.T) {
	l := mustBuild(t)
	run := func(script string) string {
		var out bytes.Buffer
		c := exec.Command("sh", "-c", script)
		c.Stdout, c.Stderr = &out, &out
		if err := l.Host("alder").Start(c); err != nil {
			t.Fatal(err)
		}
		if err := c.Wait(); err != nil {
			t.Fatalf("%s: %v: %s", script, err, out.String())
		}
		return out.String()
	}
	if out := run("touch /run/of-the-lab; ls /sys/class/net"); !strings.Contains(out, "eth0") {
		t.Errorf("interfaces of the host: %q, want eth0 among them", out)
	}
	if _, err := os.Stat("/run/of-the-lab"); err == nil {
		t.Error("/run of the machine was written")
	}
	if out := run("ls /run"); !strings.Contains(out, "of-the-lab") {
		t.Error("/run does not outlive a program of the host")
	}
}

func TestHTTP(t *testing.T) {
	l := mustBuild(t)
	if _, err := l.Host("web").Serve("web", TCP, 80); err != nil {
		t.Fatal(err)
	}
	c, err := l.Host("laptop").DialContext(t.Context(), "tcp", "10.61.1.5:80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("GET / HTTP/1.0\r\nHost: web\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := b.ReadFrom(c); err != nil {
		t.Fatal(err)
	}
	if s := b.String(); !strings.HasPrefix(s, "HTTP/1.0 200 OK") || !strings.Contains(s, "web 198.51.100.7:") {
		t.Errorf("response %q", s)
	}
}

func TestKeepNamesNamespaces(t *testing.T) {
	l := mustBuild(t)
	names, err := l.Keep("labtest-")
	for _, n := range names {
		t.Cleanup(func() {
			if out, err := exec.Command("ip", "netns", "del", n).CombinedOutput(); err != nil {
				t.Errorf("remove %s: %v: %s", n, err, out)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("ip", "-n", "labtest-web", "addr", "show", "eth0").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "10.61.1.5") {
		t.Errorf("ip addr in the kept namespace: %v: %s", err, out)
	}
}

func TestBuildNamesTheFault(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	top := small()
	top.Leaves = append(top.Leaves, LeafSpec{Name: "web", Behind: "alder"})
	if _, err := Build(top); err == nil || !strings.Contains(err.Error(), "host web") {
		t.Errorf("error %v, want one that names the host", err)
	}
}
