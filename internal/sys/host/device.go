package host

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	socket "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/fault"
)

// VIPDevice is the device that holds Service addresses, by the name that people know
// from kube-proxy. [Kernel.Addrs] and [Kernel.Watch] leave its addresses out: they are
// no addresses of the node.
const VIPDevice = "kube-ipvs0"

// ErrNoDevice: the device is not there.
var ErrNoDevice = errors.New("there is no such device")

// Device is a dummy interface: it makes the kernel take packets to its addresses as
// the node's own, on whatever interface they come in. It is DOWN and NOARP, so that
// nothing is ever sent through it; that other interfaces do not answer for its
// addresses in ARP is for sysctls and rules to see to.
type Device interface {
	// Create makes the device if it is missing, and sets it DOWN and NOARP.
	Create(ctx context.Context) error
	// Addrs lists its addresses of both families, sorted. It fails with ErrNoDevice.
	Addrs() ([]netip.Addr, error)
	// Add adds an address, with the full prefix; one that is there is no error. It
	// fails with ErrNoDevice.
	Add(a netip.Addr) error
	// Remove removes an address; one that is not there is no error.
	Remove(a netip.Addr) error
	// Delete deletes the device with its addresses; if there is none, it is no error.
	Delete() error
	// Watch closes ready when it sees changes, and then calls gone when an address was
	// removed or the device deleted by somebody else, until ctx ends; it returns nil
	// then. An error means that changes are not seen; call it again.
	Watch(ctx context.Context, ready chan<- struct{}, gone func(what string)) error
}

// KernelDevice is a device of the network namespace of the thread that calls Create
// or Addrs first. It is safe for concurrent use. The kernel loads the module dummy
// itself when the device is created; Load is for one that cannot.
type KernelDevice struct {
	Name string
	Load func(ctx context.Context, module string) error // nil: none

	mu       sync.Mutex // guards all below
	handle   *netlink.Handle
	index    int // 0: not known, or none
	watchers int
	removing map[netip.Addr]int // removals of ours that Watch will hear of
}

var _ Device = (*KernelDevice)(nil)

// open makes the socket; d.mu is held.
func (d *KernelDevice) open() error {
	if d.handle != nil {
		return nil
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open a netlink socket: %w", err)
	}
	d.handle = h
	return nil
}

// Close closes the socket, if there is one. The next call opens another.
func (d *KernelDevice) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.handle != nil {
		d.handle.Close()
		d.handle, d.index = nil, 0
	}
	return nil
}

// find looks the device up; d.mu is held.
func (d *KernelDevice) find() (netlink.Link, error) {
	if err := d.open(); err != nil {
		return nil, err
	}
	link, err := d.handle.LinkByName(d.Name)
	if _, none := errors.AsType[netlink.LinkNotFoundError](err); none {
		d.index = 0
		return nil, ErrNoDevice
	}
	if err != nil {
		return nil, err
	}
	if link.Type() != "dummy" {
		return nil, fmt.Errorf("it is of type %s instead of dummy; rename or delete it", link.Type())
	}
	d.index = link.Attrs().Index
	return link, nil
}

func (d *KernelDevice) Create(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.create(ctx); err != nil {
		return fmt.Errorf("create device %s: %w", d.Name, err)
	}
	return nil
}

func (d *KernelDevice) create(ctx context.Context) error {
	link, err := d.find()
	if errors.Is(err, ErrNoDevice) {
		add := func() error {
			err := d.handle.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: d.Name, TxQLen: -1}})
			if errors.Is(err, unix.EEXIST) { // made by another meanwhile
				return nil
			}
			return err
		}
		err = add()
		if errors.Is(err, unix.EOPNOTSUPP) {
			if err := d.loadDummy(ctx); err != nil {
				return err
			}
			err = add()
		}
		if err != nil {
			return err
		}
		link, err = d.find()
	}
	if err != nil {
		return err
	}
	if link.Attrs().Flags&net.FlagUp != 0 {
		if err := d.handle.LinkSetDown(link); err != nil {
			return fmt.Errorf("set it down: %w", err)
		}
	}
	if link.Attrs().RawFlags&unix.IFF_NOARP == 0 {
		if err := d.handle.LinkSetARPOff(link); err != nil {
			return fmt.Errorf("switch ARP off: %w", err)
		}
	}
	return nil
}

func (d *KernelDevice) loadDummy(ctx context.Context) error {
	const missing = "the kernel knows no dummy devices"
	if d.Load == nil {
		return fmt.Errorf("%s; load them with: modprobe dummy", missing)
	}
	if err := d.Load(ctx, "dummy"); err != nil {
		return fmt.Errorf("%s, and %w", missing, err)
	}
	return nil
}

func (d *KernelDevice) Addrs() ([]netip.Addr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	link, err := d.find()
	if err != nil {
		return nil, fmt.Errorf("list the addresses of %s: %w", d.Name, err)
	}
	list, err := d.handle.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list the addresses of %s: %w", d.Name, err)
	}
	out := make([]netip.Addr, 0, len(list))
	for _, l := range list {
		if a, ok := netip.AddrFromSlice(l.IP); ok {
			out = append(out, a.Unmap())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out, nil
}

func (d *KernelDevice) Add(a netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.known()
	if err == nil {
		err = fault.Inject()
	}
	if err == nil {
		err = d.handle.AddrAdd(d.link(), address(a))
	}
	switch {
	case errors.Is(err, unix.EEXIST):
		err = nil
	case errors.Is(err, unix.ENODEV):
		d.index, err = 0, ErrNoDevice
	}
	if err != nil {
		return fmt.Errorf("add address %s to %s: %w", a, d.Name, err)
	}
	return nil
}

func (d *KernelDevice) Remove(a netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.known()
	if err == nil {
		err = fault.Inject()
	}
	if err == nil {
		// The watcher may hear of it before the call returns.
		d.expect(a, 1)
		if err = d.handle.AddrDel(d.link(), address(a)); err != nil {
			d.expect(a, -1)
		}
	}
	switch {
	case errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, ErrNoDevice):
		err = nil
	case errors.Is(err, unix.ENODEV):
		d.index, err = 0, nil
	}
	if err != nil {
		return fmt.Errorf("remove address %s from %s: %w", a, d.Name, err)
	}
	return nil
}

// known looks the device up unless that was done; d.mu is held.
func (d *KernelDevice) known() error {
	if d.index != 0 {
		return nil
	}
	_, err := d.find()
	return err
}

// link is what netlink needs of the device to name it.
func (d *KernelDevice) link() netlink.Link {
	return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: d.Name, Index: d.index}}
}

// expect counts the removals of ours that a watcher has not heard of; d.mu is held.
func (d *KernelDevice) expect(a netip.Addr, n int) {
	if d.watchers == 0 {
		return
	}
	if d.removing[a] += n; d.removing[a] <= 0 {
		delete(d.removing, a)
	}
}

// address is an address with its full prefix. IPv6 is not to look for others that have
// it: through this device nobody is reached. Nor is it to choose it as the source of
// what goes elsewhere (RFC 6724, section 5, rule 3), masqueraded packets included.
func address(a netip.Addr) *netlink.Addr {
	out := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
	if a.Is6() {
		out.Flags = unix.IFA_F_NODAD
		out.ValidLft, out.PreferedLft = math.MaxUint32, 0 // for ever, and deprecated
	}
	return out
}

func (d *KernelDevice) Delete() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	link, err := d.find()
	if err == nil {
		d.index = 0
		err = d.handle.LinkDel(link)
	}
	if err != nil && !errors.Is(err, ErrNoDevice) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete device %s: %w", d.Name, err)
	}
	return nil
}

func (d *KernelDevice) Watch(ctx context.Context, ready chan<- struct{}, gone func(what string)) error {
	c, err := socket.Dial(unix.NETLINK_ROUTE, &socket.Config{Groups: addressGroups})
	if err != nil {
		return fmt.Errorf("subscribe to events of %s: %w", d.Name, err)
	}
	defer c.Close()
	d.mu.Lock()
	if d.watchers == 0 {
		d.removing = map[netip.Addr]int{}
	}
	d.watchers++
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.watchers--
	}()
	close(ready)
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		events, err := c.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			gone(fmt.Sprintf("events of %s were lost", d.Name))
		case err != nil:
			return fmt.Errorf("receive events of %s: %w", d.Name, err)
		}
		for _, e := range events {
			if what := d.lost(e); what != "" {
				gone(what)
			}
		}
	}
}

// lost says what an event took away from the device against our will, "" if nothing.
func (d *KernelDevice) lost(e socket.Message) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch e.Header.Type {
	case unix.RTM_DELLINK:
		m, ok := parseLinkEvent(e)
		if !ok || m != d.index || d.index == 0 {
			return ""
		}
		d.index = 0
		return fmt.Sprintf("device %s was deleted", d.Name)
	case unix.RTM_DELADDR:
		index, a, ok := parseAddrEvent(e)
		if !ok || index != d.index || d.index == 0 {
			return ""
		}
		if d.removing[a] > 0 {
			d.expect(a, -1)
			return ""
		}
		return fmt.Sprintf("address %s of %s was removed", a, d.Name)
	}
	return ""
}

// parseLinkEvent returns the index of the interface that an event is about
// (rtnetlink(7), struct ifinfomsg).
func parseLinkEvent(e socket.Message) (index int, ok bool) {
	if len(e.Data) < unix.SizeofIfInfomsg {
		return 0, false
	}
	return int(int32(nativeUint32(e.Data[4:]))), true
}

// parseAddrEvent returns the interface and the address that an event is about
// (rtnetlink(7), struct ifaddrmsg).
func parseAddrEvent(e socket.Message) (index int, a netip.Addr, ok bool) {
	if len(e.Data) < unix.SizeofIfAddrmsg {
		return 0, netip.Addr{}, false
	}
	index = int(nativeUint32(e.Data[4:]))
	attrs, err := syscall.ParseNetlinkRouteAttr(&syscall.NetlinkMessage{
		Header: syscall.NlMsghdr{Type: uint16(e.Header.Type)}, Data: e.Data,
	})
	if err != nil {
		return 0, netip.Addr{}, false
	}
	for _, attr := range attrs {
		// IFA_LOCAL is the address of one's own where that and IFA_ADDRESS, the peer's,
		// differ; IPv6 gives the latter only.
		if attr.Attr.Type == unix.IFA_LOCAL || attr.Attr.Type == unix.IFA_ADDRESS && !a.IsValid() {
			if v, valid := netip.AddrFromSlice(attr.Value); valid {
				a = v
			}
		}
	}
	return index, a, a.IsValid()
}
