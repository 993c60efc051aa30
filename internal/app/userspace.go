package app

import (
	"runtime"

	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/relay"
	"github.com/svcproxy/svcproxy/internal/userspace"
)

// userspaceOptions says to userspace mode what is configured.
func userspaceOptions(c *config.Config) userspace.Options {
	u := &c.Userspace
	return userspace.Options{
		Ports:        userspace.PortRange{First: u.FirstPort, Last: u.LastPort},
		Blocks:       userspace.Blocks{V4: u.Listen4, V6: u.Listen6},
		RouteBit:     u.RouteBit,
		Interception: userspace.Interception(u.Interception),
		DrainTimeout: u.DrainTimeout,
		Relay:        relayOptions(c),
	}
}

// relayOptions says to a relay what is configured.
func relayOptions(c *config.Config) relay.Options {
	u := &c.Userspace
	return relay.Options{
		ConnectTimeouts: u.ConnectTimeouts,
		Ejection:        relay.Ejection{Failures: u.EjectAfter, For: u.EjectFor},
		UDPTimeout:      u.UDPTimeout,
		Quarters:        3, // the last is for node ports on loopback
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
