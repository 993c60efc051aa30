package iptables

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pollEvery is how often the sizes of legacy tables are looked at; the kernel
// does not tell of changes to them.
const pollEvery = time.Second

// tableSize is what the kernel says of a legacy table at no cost: how many rules
// it has and how many bytes they take.
type tableSize struct{ entries, bytes uint32 }

// getInfo is struct ipt_getinfo, and ip6t_getinfo alike (linux/netfilter_ipv4/ip_tables.h).
type getInfo struct {
	name       [32]byte
	validHooks uint32
	hookEntry  [5]uint32
	underflow  [5]uint32
	entries    uint32
	size       uint32
}

// soGetInfo is IPT_SO_GET_INFO and IP6T_SO_GET_INFO.
const soGetInfo = 64

// size asks the kernel for the size of a legacy table.
func size(f Family, t Table) (tableSize, error) {
	domain, level := unix.AF_INET, unix.SOL_IP
	if f == IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return tableSize{}, fmt.Errorf("open a raw socket: %w", err)
	}
	defer unix.Close(fd)
	var info getInfo
	copy(info.name[:], t)
	n := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), soGetInfo,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return tableSize{}, fmt.Errorf("ask for the size of table %s: %w", t, errno)
	}
	return tableSize{info.entries, info.size}, nil
}

// noticeSize remembers the size of a table that is about to be read for the first time.
func (c *Command) noticeSize(t Table) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.sizes[t]; known {
		return
	}
	if now, err := size(c.family, t); err == nil {
		c.sizes[t] = now
	}
}

// noticeSizes remembers what others have changed, which a Restore would cover up. c.mu is
// held.
func (c *Command) noticeSizes() {
	for _, t := range []Table{NAT, Filter} {
		now, err := size(c.family, t)
		if err != nil {
			continue
		}
		old, known := c.sizes[t]
		if known && now != old && len(c.unsaid) < mostUnsaid {
			c.unsaid = append(c.unsaid, fmt.Sprintf("table %s of %s went from %d rules to %d", t, c.family, old.entries, now.entries))
		}
	}
}

// mostUnsaid bounds what is remembered while nobody watches.
const mostUnsaid = 4

// rememberSizes takes the present sizes as our own. c.mu is held.
func (c *Command) rememberSizes() {
	for _, t := range []Table{NAT, Filter} {
		if s, err := size(c.family, t); err == nil {
			c.sizes[t] = s
		} else {
			delete(c.sizes, t)
		}
	}
}

// watchSizes is Watch for the legacy store.
func (c *Command) watchSizes(ctx context.Context, suspect func(string)) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		found, err := c.resized()
		if err != nil {
			return fmt.Errorf("watch %s tables: %w", c.store, err)
		}
		for _, what := range found {
			suspect(what)
		}
	}
}

// resized says which tables have another size than after the last Restore, or
// than when it was said last.
func (c *Command) resized() ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	found := c.unsaid
	c.unsaid = nil
	for _, t := range []Table{NAT, Filter} {
		old, known := c.sizes[t]
		now, err := size(c.family, t)
		if errors.Is(err, unix.ENOENT) {
			now, err = tableSize{}, nil // unloaded
		}
		if err != nil {
			return nil, err
		}
		if known && now != old {
			found = append(found, fmt.Sprintf("table %s of %s went from %d rules to %d", t, c.family, old.entries, now.entries))
		}
		c.sizes[t] = now
	}
	return found, nil
}

// Watch implements Tables.
func (c *Command) Watch(ctx context.Context, ours func(string) bool, ready func(), suspect func(string)) error {
	if c.store == Legacy {
		ready() // sizes are known since the first Save
		return c.watchSizes(ctx, suspect)
	}
	return c.watchEvents(ctx, ours, ready, suspect)
}
