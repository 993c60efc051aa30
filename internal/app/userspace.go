package app

import (
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
	}
}
