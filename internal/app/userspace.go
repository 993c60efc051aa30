package app

import (
	"github.com/svcproxy/svcproxy/internal/config"
	"github.com/svcproxy/svcproxy/internal/userspace"
)

// userspaceOptions says to userspace mode what is configured.
func userspaceOptions(*config.Config) userspace.Options {
	return userspace.Options{}
}
