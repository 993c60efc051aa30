package app

import (
	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/relay"
	"github.com/svcproxy/svcproxy/internal/userspace"
)

// userspaceOptions says to userspace mode what is configured.
func userspaceOptions(c *config.Config) userspace.Options {
	return userspace.Options{Relay: relayOptions(c)}
}

// relayOptions says to a relay what is configured.
func relayOptions(*config.Config) relay.Options {
	return relay.Options{}
}
