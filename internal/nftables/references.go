package nftables

import (
	"bytes"
	"cmp"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// reference is an element that several Service ports may need. There is one for
// every endpoint, so it holds no pointer.
type reference struct {
	kind  referenceKind
	proto plan.Protocol // of a hairpin
	port  uint16
	addr  [16]byte
}

// referenceKind is the set in which an element is.
type referenceKind uint8

const (
	clusterIP referenceKind = iota
	external
	hairpin
	endpointAddr
)

func (k referenceKind) set() string {
	return [...]string{setClusterIPs, setExternal, setHairpin, setEndpointAddrs}[k]
}

func refer(k referenceKind, a netip.Addr) reference { return reference{kind: k, addr: a.As16()} }

func (r reference) element(f plan.Family) nft.Element {
	a := netip.AddrFrom16(r.addr)
	if f == plan.IPv4 {
		a = a.Unmap()
	}
	if r.kind == hairpin {
		return nft.Element{Key: nft.Concat(nil).Addr(a).Addr(a).Proto(uint8(r.proto)).Port(r.port).Tuple()}
	}
	return nft.Element{Key: nft.AddrTuple(a)}
}

// references counts who needs elements.
type references struct {
	liberal bool
	counts  map[reference]int32
}

// use counts one more user, and reports whether it is the first.
func (r *references) use(k reference) bool {
	r.counts[k]++
	return r.counts[k] == 1
}

// release counts one less, and reports whether it was the last.
func (r *references) release(k reference) bool {
	r.counts[k]--
	if r.counts[k] > 0 {
		return false
	}
	delete(r.counts, k)
	return true
}

// compare orders references.
func (k reference) compare(o reference) int {
	return cmp.Or(
		cmp.Compare(k.kind, o.kind), bytes.Compare(k.addr[:], o.addr[:]),
		cmp.Compare(k.port, o.port), cmp.Compare(k.proto, o.proto))
}

// of returns the references of a Service port, sorted, each once.
func (r *references) of(v *rendered) []reference {
	if v.service == nil {
		return nil
	}
	sp := v.sp
	meetsItself := sp.MayMeetItself(v.local)
	out := make([]reference, 0, len(v.fronts)+len(sp.Draining)+2*(len(sp.Pools[0])+len(sp.Pools[1])))
	var used [2]bool
	for i := range v.fronts {
		f := &v.fronts[i]
		switch f.Kind {
		case plan.ClusterIP:
			out = append(out, refer(clusterIP, f.Addr))
		case plan.ExternalIP, plan.LoadBalancerIP:
			out = append(out, refer(external, f.Addr))
		}
		for p, u := range f.uses {
			used[p] = used[p] || u
		}
	}
	guarded := !r.liberal && sp.ID.Protocol == plan.TCP
	if guarded {
		for _, a := range sp.Draining {
			out = append(out, refer(endpointAddr, a.Addr()))
		}
	}
	for pool, eps := range sp.Pools {
		if !used[pool] {
			continue
		}
		for i := range eps {
			e := &eps[i]
			if e.Weight > 0 && meetsItself(*e) {
				h := refer(hairpin, e.Addr.Addr())
				h.proto, h.port = sp.ID.Protocol, e.Addr.Port()
				out = append(out, h)
			}
			if guarded {
				out = append(out, refer(endpointAddr, e.Addr.Addr()))
			}
		}
	}
	slices.SortFunc(out, reference.compare)
	return slices.Compact(out)
}
