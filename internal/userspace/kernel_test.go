package userspace

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/lab/nstest"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/plan/plantest"
	"github.com/svcproxy/svcproxy/internal/relay/handover"
	"github.com/svcproxy/svcproxy/internal/sys/conntrack"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
	"github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
	"github.com/svcproxy/svcproxy/internal/sys/route"
	"github.com/svcproxy/svcproxy/internal/userspace/listeners"
)

// inNamespace moves the test into a network namespace of its own, in which the
// addresses are the host's and everything else is reached by a default route.
func inNamespace(t *testing.T, addrs ...netip.Addr) {
	t.Helper()
	nstest.Enter(t)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
		if err := netlink.AddrAdd(lo, addr); err != nil {
			t.Fatal(err)
		}
	}
}

// kernelBackend is a backend on the kernel, that has the relay run on threads of the
// namespace: the test's thread makes all sockets.
func kernelBackend(t *testing.T, o Options) (*backend, *kernel.Tables) {
	t.Helper()
	k := &kernel.Tables{}
	b, err := newBackend(testEnv(), o, host{k, route.Kernel{}, &conntrack.Kernel{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if b.relay != nil {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_ = b.relay.Shutdown(ctx)
		}
		k.Close()
	})
	return b, k
}

// The kernel takes what the fake takes and lists the same, and nft can print it.
func TestKernelHoldsWhatTheFakeHolds(t *testing.T) {
	inNamespace(t)
	p := webPlan(plan.TCP, 5)
	sp := *p.Services[webID(plan.TCP)]
	sp.Frontends = append(sp.Frontends,
		plan.Frontend{Kind: plan.ExternalIP, Addr: at(plan.IPv4, "external", 1), Port: 80, Route: [3]plan.Route{{Verdict: plan.Drop}, {}, {Verdict: plan.Reject}}},
		plan.Frontend{Kind: plan.LoadBalancerIP, Addr: at(plan.IPv4, "external", 2), Port: 80, Allow: []netip.Prefix{prefix(at(plan.IPv4, "client", 0), 25, 0)}})
	p.Services[sp.ID] = &sp
	b, k := kernelBackend(t, Options{Ports: listeners.PortRange{First: 40000, Last: 40000}})
	ctx := context.Background()
	if err := b.Apply(ctx, plantest.Difference(nil, p)); err != nil {
		t.Fatal(err)
	}
	memory := &fake.Tables{}
	r := newRig(t, nil)
	r.backend.host.tables = memory
	for _, f := range r.families {
		f.tables = memory
		f.sockets = fixedPort{r.sockets, 40000}
	}
	r.mustApply(t, plantest.Difference(nil, p))
	compare := func(what, listed string) {
		t.Helper()
		for _, f := range plan.Families {
			if have, want := state(t, k, f), state(t, memory, f); have != want {
				t.Errorf("%s, %s: %s", what, f, plantest.FirstDifference(have, want))
			}
		}
		if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil || !strings.Contains(string(out), listed) {
			t.Errorf("%s: nft list ruleset: %v\n%s", what, err, out)
		}
	}
	compare("while the process relays", "169.254.247.")
	// A second process finds everything as it should be.
	again, k2 := kernelBackend(t, Options{Ports: listeners.PortRange{First: 40000, Last: 40001}})
	again.begun = true
	for _, f := range again.families {
		f.sockets = fixedPort{r.sockets, 40000}
	}
	if lines, err := again.Diff(ctx, p); err != nil || len(lines) > 0 {
		t.Errorf("differences %q, %v", lines, err)
	}
	b.standIn(ctx)
	r.standIn(ctx)
	compare("while the kernel stands in", at(plan.IPv4, "pod", 5).String()+" . 8080")
	if err := errors.Join(b.retire(), r.retire()); err != nil {
		t.Error(err)
	}
	compare("after another mode has taken over", "unmark-input")
	if err := cleanup(ctx, again.env, again.host); err != nil {
		t.Fatal(err)
	}
	if left := state(t, k2, plan.IPv4) + state(t, k2, plan.IPv6); left != "" {
		t.Errorf("left: %s", left)
	}
}

func webID(p plan.Protocol) plan.ID {
	return plan.ID{Namespace: "default", Name: "web", Port: "http", Protocol: p, Family: plan.IPv4}
}

// fixedPort gives every Service port the same port.
type fixedPort struct {
	sockets
	port uint16
}

func (f fixedPort) Serve(*plan.ServicePort, listeners.Set, uint16) (uint16, error) {
	return f.port, nil
}

// Whoever has the host's network can listen where a process of the mode is asked to
// retire. That keeps no other mode from being the only one.
func TestKernelOtherUserHasNoSay(t *testing.T) {
	inNamespace(t)
	// The credentials of who listens count; the thread ends with the test.
	asOther := func(uid uintptr) {
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uid, ^uintptr(0)); errno != 0 {
			t.Fatal(errno)
		}
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: handoverPath}); err != nil {
		t.Fatal(err)
	}
	asOther(65534)
	err = unix.Listen(fd, 1)
	asOther(0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := handover.Inherit(context.Background(), handoverPath); err == nil {
		t.Error("a process of another user can hand over")
	}
	if err := handOver(context.Background(), dataplane.Env{Families: plan.Families[:], Log: slog.New(slog.DiscardHandler)}); err != nil {
		t.Error(err)
	}
}
