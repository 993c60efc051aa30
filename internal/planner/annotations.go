package planner

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// The annotations of a Service that choose more than the Service API can say. They
// are an API: docs/annotations.md describes each.
const (
	annotationScheduler      = "svcproxy.io/ipvs-scheduler"
	annotationSchedulerFlags = "svcproxy.io/ipvs-scheduler-flags"
	annotationWeights        = "svcproxy.io/weights"
	annotationHealthCheck    = "svcproxy.io/health-check"
	annotationDrain          = "svcproxy.io/drain-timeout"
	annotationVanished       = "svcproxy.io/vanished-endpoint-timeout"
	annotationClientAddress  = "svcproxy.io/client-address"
	annotationProxyProtocol  = "svcproxy.io/proxy-protocol"
)

// schedulers are those of ip_vs, and random.
var schedulers = []string{
	"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh", "fo", "ovf", "twos", "random",
}

// Limits of the timeouts.
const (
	leastTimeout = time.Second
	mostTimeout  = 24 * time.Hour
)

// choice is what the annotations of one Service say, and the defaults where they
// say nothing. Services without annotations share one.
type choice struct {
	tcp, other *plan.Policy // by protocol; nil: the zero Policy
	weights    weights
	warnings   []remark // on values that are wrong and have no effect
}

// policy returns what is chosen for ports of a protocol.
func (c *choice) policy(p plan.Protocol) *plan.Policy {
	if p == plan.TCP {
		return c.tcp
	}
	return c.other
}

// remark is a warning without its object.
type remark struct {
	reason  plan.Reason
	message string
}

func (c *choice) warn(r plan.Reason, format string, args ...any) {
	c.warnings = append(c.warnings, remark{r, fmt.Sprintf(format, args...)})
}

// parseAnnotations reads those under svcproxy.io/. A wrong value is as good as none;
// defaultCheck is in force without a health check of the Service's own.
func parseAnnotations(in map[string]string, defaultCheck plan.HealthCheck) *choice {
	c := &choice{}
	p := plan.Policy{Check: defaultCheck}
	for _, name := range slices.Sorted(maps.Keys(in)) {
		value := strings.TrimSpace(in[name])
		var err error
		switch name {
		case annotationScheduler:
			p.Scheduler, err = oneOf(value, schedulers...)
		case annotationSchedulerFlags:
			p.SourcePort, p.Fallback, err = parseFlags(value)
		case annotationWeights:
			c.weights, err = parseWeights(value)
		case annotationHealthCheck:
			var h plan.HealthCheck
			if h, err = plan.ParseHealthCheck(value); err == nil {
				p.Check = h
			}
		case annotationDrain:
			p.DrainTimeout, err = parseTimeout(value)
		case annotationVanished:
			p.VanishedTimeout, err = parseTimeout(value)
		case annotationClientAddress:
			p.ClientAddress, err = parseClientAddress(value)
		case annotationProxyProtocol:
			p.ProxyProtocol, err = parseProxyProtocol(value)
		default:
			c.warn(UnknownAnnotation, "metadata.annotations[%q] has no meaning in this version and is ignored: correct or remove it", name)
		}
		if err != nil {
			c.warn(InvalidAnnotation, "metadata.annotations[%q] %.80q has no effect: %v", name, in[name], err)
		}
	}
	if hashes := p.Scheduler == "" || p.Scheduler == "sh" || p.Scheduler == "mh"; !hashes && (p.SourcePort || p.Fallback) {
		p.SourcePort, p.Fallback = false, false
		c.warn(InvalidAnnotation, "metadata.annotations[%q] %.80q has no effect: scheduler %s has no flags; use sh or mh", annotationSchedulerFlags, in[annotationSchedulerFlags], p.Scheduler)
	}
	c.set(p)
	return c
}

// set splits a Policy by protocol. Only TCP has the PROXY protocol and flows that
// outlive their endpoint unnoticed. Nothing can be said about an endpoint by way of
// a port that takes neither connections nor requests.
func (c *choice) set(p plan.Policy) {
	other := p
	other.ProxyProtocol, other.VanishedTimeout = 0, 0
	if p.Check.Port == 0 {
		other.Check = plan.HealthCheck{}
	}
	if p != (plan.Policy{}) {
		c.tcp = &p
	}
	if other != (plan.Policy{}) {
		c.other = &other
	}
}

// remarkChoice adds the warnings on the Service's annotations.
func (d *draft) remarkChoice() {
	c := d.s.choice
	for _, w := range c.warnings {
		d.notes.warn(w.reason, "%s", w.message)
	}
	if c.tcp == nil {
		return
	}
	anyTCP := false
	for i := range d.svc.Ports {
		port := &d.svc.Ports[i]
		if protocolOf(port) == plan.TCP {
			anyTCP = true
			continue
		}
		_, asked := d.svc.Annotations[annotationHealthCheck]
		if asked && c.tcp.Check.Method != plan.NoCheck && c.tcp.Check.Port == 0 {
			d.notes.warn(InvalidAnnotation, "metadata.annotations[%q] has no effect on port %s: only a TCP port can be probed; name one of the endpoints' with port=", annotationHealthCheck, portText(port))
		}
	}
	if c.tcp.ProxyProtocol != 0 && !anyTCP {
		d.notes.warn(InvalidAnnotation, "metadata.annotations[%q] has no effect: the Service has no TCP port; remove it", annotationProxyProtocol)
	}
}

func oneOf(value string, allowed ...string) (string, error) {
	if !slices.Contains(allowed, value) {
		return "", fmt.Errorf("use one of %s", strings.Join(allowed, ", "))
	}
	return value, nil
}

func parseFlags(value string) (sourcePort, fallback bool, err error) {
	for _, flag := range strings.Split(value, ",") {
		switch strings.TrimSpace(flag) {
		case "source-port":
			sourcePort = true
		case "fallback":
			fallback = true
		default:
			return false, false, fmt.Errorf("%q is no flag; use source-port, fallback, or both with a comma between", flag)
		}
	}
	return sourcePort, fallback, nil
}

func parseTimeout(value string) (time.Duration, error) {
	d, err := time.ParseDuration(value)
	if err != nil || d < leastTimeout || d > mostTimeout {
		return 0, fmt.Errorf("write a time from %s to %s, like 90s or 10m", leastTimeout, mostTimeout)
	}
	return d, nil
}

func parseClientAddress(value string) (plan.ClientAddress, error) {
	switch value {
	case "keep":
		return plan.ClientAddressKept, nil
	case "hide":
		return plan.ClientAddressHidden, nil
	}
	return plan.ClientAddressByRoute, fmt.Errorf("use keep or hide")
}

func parseProxyProtocol(value string) (uint8, error) {
	switch value {
	case "v1":
		return 1, nil
	case "v2":
		return 2, nil
	}
	return 0, fmt.Errorf("use v1 or v2")
}
