package dataplane

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// refusing makes the kernel refuse every version of a Service port that bad says,
// one at a time, as a restore that stops at the first wrong line does.
func refusing(bad func(*plan.ServicePort) bool) func(int, plan.Update) error {
	return func(_ int, u plan.Update) error {
		for id, sp := range u.Plan.Services {
			if bad(sp) {
				return fmt.Errorf("restore: %w", &ObjectError{ID: id, Err: errors.New("bad mask")})
			}
		}
		return nil
	}
}

func endpoints(sp *plan.ServicePort) int { return len(sp.Pools[plan.Cluster]) }

// Fifty Services are programmed although one cannot be.
func TestOneRefusedServiceAmongFifty(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) {
		for i := range 50 {
			b.world.set(service(tcp(fmt.Sprintf("s%02d", i)), byte(i), 1))
		}
		b.world.set(service(tcp("odd"), 99, 1))
		b.kernel.fail = refusing(func(sp *plan.ServicePort) bool { return sp.ID.Name == "odd" })
	}, func(b *bench) {
		if n := len(b.kernel.lines()); n != 50 {
			t.Errorf("%d Services in the kernel", n)
		}
		s := b.Status()
		if !s.Synced || s.LastError != "" || len(s.Quarantined) != 1 {
			t.Fatalf("status %+v", s)
		}
		q := s.Quarantined[0]
		if q.Service != "default/odd:http" || q.Error != "bad mask" || q.InForce {
			t.Errorf("quarantined %+v", q)
		}
		if have := b.rec.reasons(); !slices.Equal(have, []string{"RefusedByKernel odd"}) {
			t.Errorf("notes %q", have)
		}
		if have := b.rec.get("svcproxy_quarantined_service_ports"); have != 1 {
			t.Errorf("metric is %v", have)
		}
		b.world.set(service(tcp("s00"), 0, 1, 2)) // others go on changing
		b.pass(2 * time.Second)
		if !slices.Contains(b.kernel.lines(), "s00 2") {
			t.Error("a change of another Service is not in the kernel")
		}
	})
}

// What served before goes on serving when its new version is refused.
func TestLastGoodVersionStays(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(service(tcp("web"), 20, 1), service(tcp("other"), 21, 1))
		b.kernel.fail = refusing(func(sp *plan.ServicePort) bool { return sp.ID.Name == "web" && endpoints(sp) == 2 })
	}, func(b *bench) {
		b.pass(10 * time.Second)
		b.world.set(service(tcp("web"), 20, 1, 2))
		b.pass(2 * time.Second)
		b.wantLines("other 1", "web 1")
		if q := b.Status().Quarantined; len(q) != 1 || !q[0].InForce {
			t.Fatalf("quarantined %+v", q)
		}
		b.world.set(service(tcp("web"), 20, 1, 2, 3)) // its facts change to something the kernel takes
		b.pass(2 * time.Second)
		b.wantLines("other 1", "web 3")
		if q := b.Status().Quarantined; len(q) != 0 {
			t.Errorf("quarantined %+v", q)
		}
		if have := b.rec.reasons(); !slices.Equal(have, []string{"RefusedByKernel web", "AcceptedByKernel web"}) {
			t.Errorf("notes %q", have)
		}
	})
}

// The refused is tried again, less and less often, and taken when the kernel can.
func TestQuarantineEndsByItself(t *testing.T) {
	var able atomic.Bool
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(service(tcp("web"), 20, 1))
		b.kernel.fail = refusing(func(sp *plan.ServicePort) bool { return !able.Load() && endpoints(sp) == 2 })
	}, func(b *bench) {
		b.pass(10 * time.Second)
		b.world.set(service(tcp("web"), 20, 1, 2))
		b.pass(2 * time.Second)
		before := len(b.kernel.calls())
		b.pass(time.Hour)
		if tries := len(b.kernel.calls()) - before; tries < 10 || tries > 20 { // two Applies for each
			t.Errorf("%d Applies in an hour", tries)
		}
		b.wantLines("web 1")
		if have := b.rec.reasons(); len(have) != 1 {
			t.Errorf("notes %q", have)
		}
		able.Store(true)
		b.pass(lastRelease)
		b.wantLines("web 2")
		if q := b.Status().Quarantined; len(q) != 0 {
			t.Errorf("quarantined %+v", q)
		}
	})
}

// If the kernel takes not even the version that it has, the port is left out.
func TestLastGoodVersionIsRefusedToo(t *testing.T) {
	var broken atomic.Bool
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(service(tcp("web"), 20, 1), service(tcp("other"), 21, 1))
		b.kernel.fail = refusing(func(sp *plan.ServicePort) bool { return broken.Load() && sp.ID.Name == "web" })
	}, func(b *bench) {
		b.pass(10 * time.Second)
		broken.Store(true)
		b.world.set(service(tcp("web"), 20, 1, 2))
		b.pass(2 * time.Second)
		b.wantLines("other 1")
		if q := b.Status().Quarantined; len(q) != 1 || q[0].InForce {
			t.Errorf("quarantined %+v", q)
		}
	})
}

// Several are told in one error.
func TestSeveralRefused(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(service(tcp("a"), 20, 1), service(tcp("b"), 21, 1), service(tcp("c"), 22, 1))
		b.kernel.fail = func(_ int, u plan.Update) error {
			var errs []error
			for _, name := range []string{"a", "b"} {
				if u.Plan.Services[tcp(name)] != nil {
					errs = append(errs, &ObjectError{ID: tcp(name), Err: errors.New("bad mask")})
				}
			}
			return errors.Join(errs...)
		}
	}, func(b *bench) {
		b.wantLines("c 1")
		if n := len(b.kernel.calls()); n != 3 { // the node's part, the refused, the rest
			t.Errorf("%d Applies", n)
		}
	})
}

// A Service that goes away while it is refused leaves nothing behind.
func TestRefusedServiceGoesAway(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(service(tcp("odd"), 20, 1))
		b.kernel.fail = refusing(func(*plan.ServicePort) bool { return true })
	}, func(b *bench) {
		b.world.remove(tcp("odd"))
		b.pass(2 * firstRelease)
		if q := b.Status().Quarantined; len(q) != 0 {
			t.Errorf("quarantined %+v", q)
		}
		if have := b.rec.reasons(); !slices.Equal(have, []string{"RefusedByKernel odd"}) {
			t.Errorf("notes %q", have)
		}
	})
}

// An error that names a port which is not in the plan is an ordinary failure.
func TestForeignObjectError(t *testing.T) {
	onBench(t, func(b *bench, _ *Config) {
		b.kernel.fail = func(n int, _ plan.Update) error {
			if n < 4 {
				return &ObjectError{ID: tcp("ghost"), Err: errors.New("in use")}
			}
			return nil
		}
	}, func(b *bench) {
		if s := b.Status(); s.Failures == 0 || len(s.Quarantined) != 0 {
			t.Errorf("status %+v", s)
		}
		b.pass(10 * time.Second)
		if !b.Synced() {
			t.Error("not synced")
		}
	})
}

// A Service port that failed because the kernel lacked something for a moment is in force
// within seconds of the moment's end.
func TestQuarantineOfAMomentIsShort(t *testing.T) {
	var able atomic.Bool
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(service(tcp("web"), 20, 1), service(tcp("other"), 21, 1))
		b.kernel.fail = func(_ int, u plan.Update) error {
			for id := range u.Plan.Services {
				if id.Name == "web" && !able.Load() {
					return &ObjectError{ID: id, Err: fmt.Errorf("create real server: %w", syscall.ENOBUFS)}
				}
			}
			return nil
		}
	}, func(b *bench) {
		b.pass(time.Hour)
		b.wantLines("other 1")
		able.Store(true)
		b.pass(lastMomentRelease)
		b.wantLines("other 1", "web 1")
		if q := b.Status().Quarantined; len(q) != 0 {
			t.Errorf("quarantined %+v", q)
		}
	})
}

// A Service port that is refused for several of its objects at once was tried once.
func TestManyRefusalsAreOneAttempt(t *testing.T) {
	var able atomic.Bool
	onBench(t, func(b *bench, _ *Config) {
		b.world.set(service(tcp("web"), 20, 1))
		b.kernel.fail = func(_ int, u plan.Update) error {
			var errs []error
			for id := range u.Plan.Services {
				for range 20 {
					if !able.Load() {
						errs = append(errs, &ObjectError{ID: id, Err: errors.New("bad mask")})
					}
				}
			}
			return errors.Join(errs...)
		}
	}, func(b *bench) {
		b.pass(10 * time.Second)
		b.wantLines()
		able.Store(true)
		b.pass(firstRelease)
		b.wantLines("web 1")
	})
}
