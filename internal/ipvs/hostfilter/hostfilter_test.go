package hostfilter

import (
	"context"
	"strings"
	"testing"

	"github.com/svcproxy/svcproxy/internal/sys/iptables"
)

// hostInMemory is a host with one store.
type hostInMemory struct {
	*iptables.Fake
	has bool
}

func (h hostInMemory) Legacy() bool                          { return false }
func (h hostInMemory) Present(context.Context) (bool, error) { return h.has, nil }
func (h hostInMemory) Stores(context.Context) ([]iptables.Tables, error) {
	return []iptables.Tables{h.Fake}, nil
}

// The host's filter lets Service traffic in and out, whatever it was before; once that
// is so nothing is written, and clean-up leaves what was there.
func TestHostFilter(t *testing.T) {
	const others = "*filter\n:KUBE-FIREWALL - [0:0]\n-A INPUT -j KUBE-FIREWALL\n-A FORWARD -i eth9 -j DROP\nCOMMIT\n"
	for name, before := range map[string]string{
		"nothing of ours": "",
		"a jump is missing": "*filter\n:SVCPROXY-INPUT - [0:0]\n:SVCPROXY-FORWARD - [0:0]\n-A SVCPROXY-INPUT -j ACCEPT\n-A SVCPROXY-FORWARD -j ACCEPT\n" +
			"-A INPUT -j SVCPROXY-INPUT\nCOMMIT\n",
		"the rules are gone": "*filter\n:SVCPROXY-INPUT - [0:0]\n:SVCPROXY-FORWARD - [0:0]\n-A INPUT -j SVCPROXY-INPUT\n-A FORWARD -j SVCPROXY-FORWARD\nCOMMIT\n",
	} {
		f := iptables.NewFake(iptables.IPv4, iptables.NFT)
		for _, input := range []string{others, before} {
			if input == "" {
				continue
			}
			if err := f.Meddle(input); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		h := hostInMemory{f, true}
		ctx := context.Background()
		for range 2 {
			if err := Open(ctx, h, 0x4000); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		if n := f.Restores(); n != 1 {
			t.Errorf("%s: written %d times", name, n)
		}
		have := f.String()
		for _, want := range []string{
			"-A INPUT -j SVCPROXY-INPUT\n-A INPUT -j KUBE-FIREWALL\n", "-A FORWARD -j SVCPROXY-FORWARD\n-A FORWARD -i eth9 -j DROP\n",
			"-m mark --mark 0x4000/0x4000 -j ACCEPT\n", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n",
		} {
			if strings.Count(have, want) != 1 {
				t.Errorf("%s: want %q once in\n%s", name, want, have)
			}
		}
		for range 2 {
			if err := Close(ctx, h); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		if have := f.String(); strings.Contains(have, "SVCPROXY") || !strings.Contains(have, "KUBE-FIREWALL") {
			t.Errorf("%s: after clean-up\n%s", name, have)
		}
	}
}

// Without a table filter there is nothing to open.
func TestHostWithoutFilter(t *testing.T) {
	f := iptables.NewFake(iptables.IPv4, iptables.NFT)
	if err := Open(context.Background(), hostInMemory{f, false}, 0x4000); err != nil || f.Restores() != 0 {
		t.Errorf("have %v and %d writes", err, f.Restores())
	}
}
