// Package sysctls says which kernel settings ipvs mode needs.
package sysctls

import (
	"strconv"
	"strings"
)

// Setting is a sysctl that the mode needs.
type Setting struct {
	Name, Value, Why string
}

// Kernels before 4.1 have no conn_reuse_mode. Until 5.9 a connection that was chosen
// anew lost its first packet, which cost the client a second.
const (
	reuseSince = 4<<8 | 1
	reuseFixed = 5<<8 | 9
)

// version reads the first two numbers of a kernel's release, as major<<8 | minor; 0 if
// there are none.
func version(release string) int {
	major, rest, _ := strings.Cut(release, ".")
	minor := rest
	if end := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		minor = rest[:end]
	}
	a, err1 := strconv.Atoi(major)
	b, err2 := strconv.Atoi(minor)
	if err1 != nil || err2 != nil {
		return 0
	}
	return a<<8 | b
}

// For lists the sysctls for a kernel, by its release.
func For(release string, strictARP bool) []Setting {
	out := []Setting{
		{"net.ipv4.ip_forward", "1", "packets are forwarded to endpoints"},
		{"net.ipv4.vs.conntrack", "1", "masquerading needs connection tracking"},
		{"net.ipv4.vs.expire_nodest_conn", "1", "connections end with their real server"},
		{"net.ipv4.vs.expire_quiescent_template", "1", "persistence ends with its real server"},
	}
	switch v := version(release); {
	case v == 0 || v >= reuseFixed:
		out = append(out, Setting{"net.ipv4.vs.conn_reuse_mode", "1", "a client's port that is used again may get another real server"})
	case v >= reuseSince:
		out = append(out, Setting{"net.ipv4.vs.conn_reuse_mode", "0",
			"before Linux 5.9, 1 delays connections from a port that is used again by a second; with 0 they stay with their old real server, even if it drains"})
	}
	if strictARP {
		out = append(out, Setting{"net.ipv4.conf.all.arp_ignore", "1", "strictARP"}, Setting{"net.ipv4.conf.all.arp_announce", "2", "strictARP"})
	}
	return out
}
