package app

import (
	"runtime"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/relay"
	"github.com/svcproxy/svcproxy/internal/userspace"
)

// loopbackQuarters are the quarters of the process's descriptors for connections to node
// ports on loopback where the mode carries traffic itself, so that neither can use up
// what the other needs.
const loopbackQuarters = 1

// userspaceOptions says to userspace mode what is configured.
func userspaceOptions(c *config.Config) userspace.Options {
	u, r := &c.Userspace, relayOptions(c)
	r.Quarters = 4 - loopbackQuarters
	return userspace.Options{
		Ports:        userspace.PortRange{First: u.FirstPort, Last: u.LastPort},
		Blocks:       userspace.Blocks{V4: u.Listen4, V6: u.Listen6},
		RouteBit:     u.RouteBit,
		Interception: userspace.Interception(u.Interception),
		DrainTimeout: u.DrainTimeout,
		Relay:        r,
	}
}

// relayOptions says to a relay what is configured.
func relayOptions(c *config.Config) relay.Options {
	u := &c.Userspace
	return relay.Options{
		ConnectTimeouts: u.ConnectTimeouts,
		Ejection:        relay.Ejection{Failures: u.EjectAfter, For: u.EjectFor},
		UDPTimeout:      u.UDPTimeout,
	}
}

// oneMoreProcessor lets the runtime use one processor more than there are, for a mode
// that carries the traffic itself: a relay has an event loop for all but one, and as
// long as one is free the runtime does not take the others from loops that wait, which
// costs a tenth of a connection. It returns what undoes it.
func oneMoreProcessor() func() {
	before := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(before + 1)
	return func() { runtime.GOMAXPROCS(before) }
}
