// Package ipvs carries out a plan with the kernel's IP Virtual Server: a virtual
// server for every address and port of a Service, its endpoints as real servers, the
// ClusterIPs on a dummy device, and a small nftables table for what ip_vs does not do:
// refusals, source ranges, masquerading, and who goes to which virtual server. See
// README.md for a packet's path.
//
// [settings.render] says what one Service port needs, [family] compares it with what
// is there and writes the difference. Nothing is executed: the kernel is spoken to by
// netlink. Loopback node ports are not served here.
package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/svcproxy/svcproxy/internal/ipvs/hostfilter"
	"github.com/svcproxy/svcproxy/internal/ipvs/remark"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/ipset"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	nft "github.com/svcproxy/svcproxy/internal/sys/nft/kernel"
	"github.com/svcproxy/svcproxy/internal/sys/route"
)

// Options are the settings of this mode only. The zero value has the defaults.
type Options struct {
	Scheduler string // of Services that choose none; "": rr
	// Exclude are ranges whose virtual servers are never touched, whoever made them.
	Exclude   []netip.Prefix
	StrictARP bool
	// Idle timeouts in whole seconds; 0 leaves the kernel's.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// DrainTimeout is how long flows to endpoints that are gone may go on, for Services
	// that choose nothing else; 0: 15 minutes.
	DrainTimeout time.Duration
}

// defaultDrainTimeout is as long as ip_vs remembers an idle connection.
const defaultDrainTimeout = 15 * time.Minute

func (o Options) drainTimeout() time.Duration { return cmp.Or(o.DrainTimeout, defaultDrainTimeout) }

// Mode returns the mode.
func Mode(o Options) dataplane.Mode {
	h := &handover{}
	return dataplane.Mode{
		Name:      Name,
		Supported: func(ctx context.Context) error { return Supports(ctx, plan.IPv4) },
		Limits:    func(ctx context.Context) []string { k := newKernel(); defer k.close(); return limits(ctx, k) },
		New: func(env dataplane.Env) (dataplane.Backend, error) {
			return newBackend(env, o, newKernel()), nil
		},
		Cleanup:  func(ctx context.Context, env dataplane.Env) error { return cleanup(ctx, env, o, newKernel()) },
		HandOver: func(ctx context.Context, env dataplane.Env) error { return h.next(ctx, env, o, newKernel()) },
		CleanupOwn: func(ctx context.Context, env dataplane.Env) error {
			k := newKernel() // kube-proxy has no virtual servers by mark
			return errors.Join(cleanupOwn(ctx, env, o, k, func(key ipvs.Key) bool { return key.Mark == 0 }), k.close())
		},
		CleanupKubeProxy: func(ctx context.Context, env dataplane.Env) error { return cleanupKubeProxy(ctx, env, o, newKernel()) },
		InForce: func(ctx context.Context, _ dataplane.Env) (bool, error) {
			if h.underWay() { // of kube-proxy's objects it cannot be told
				return false, nil
			}
			return inForce(ctx, newKernel())
		},
	}
}

// newKernel is the running kernel.
func newKernel() kernel {
	h := host.Kernel{}
	beside := &nft.Tables{} // the host's filter is looked at while others are written
	return kernel{
		tables: &nft.Tables{}, beside: beside, servers: &ipvs.Kernel{Load: h.Load},
		device: &host.KernelDevice{Name: host.VIPDevice, Load: h.Load}, routing: route.Kernel{}, sets: ipset.Kernel{}, sysctls: h, modules: h, now: time.Now,
		host: func(f plan.Family) hostfilter.Filter { return hostfilter.Host{Family: f, Tables: beside} },
	}
}

// backend is the mode at work.
type backend struct {
	env  dataplane.Env
	opts Options
	k    kernel

	mu       sync.Mutex // guards the next four
	families []*family
	tuned    bool // sysctls and time-outs are set
	applies  int
	remarks  *remark.Log

	tuning tuning
}

func newBackend(env dataplane.Env, o Options, k kernel) *backend {
	b := &backend{env: env, opts: o, k: k, remarks: remark.New()}
	for _, f := range env.Families {
		b.families = append(b.families, newFamily(env, o, f, k, b.remarks))
	}
	return b
}

// Apply implements dataplane.Backend.
func (b *backend) Apply(ctx context.Context, u plan.Update) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tune()
	b.applies++
	var listed []ipvs.Entry
	if slices.ContainsFunc(b.families, func(f *family) bool { return !f.known }) {
		var err error
		if listed, err = b.k.servers.Dump(ctx); err != nil {
			return fmt.Errorf("read the virtual servers: %w", err)
		}
	}
	var errs []error
	for _, f := range b.families {
		err := f.carryOut(ctx, u, listed)
		if err != nil && f.outdated {
			// No Service is to wait for what others have done to its virtual server.
			b.env.Log.Warn("virtual servers were changed by somebody else; they are read back", "family", f.fam, "found", err)
			b.env.Stats.Add("svcproxy_interference_total", 1)
			f.forget()
			var again []ipvs.Entry
			if again, err = b.k.servers.Dump(ctx); err == nil {
				err = f.carryOut(ctx, u, again)
			}
		}
		if err != nil {
			f.forget()
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Invalidate implements dataplane.Backend.
func (b *backend) Invalidate() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tuned = false
	clear(b.remarks.Missing) // their modules may have come
	for _, f := range b.families {
		f.forget()
	}
}

// Due implements dataplane.Timed: flows to endpoints that are gone are looked after.
func (b *backend) Due() time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	var first time.Time
	for _, f := range b.families {
		if at := f.due(); !at.IsZero() && (first.IsZero() || at.Before(first)) {
			first = at
		}
	}
	return first
}
