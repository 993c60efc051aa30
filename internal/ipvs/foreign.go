package ipvs

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/ipvs/remark"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// others lists the virtual servers that are not ours and will not be.
func (f *family) others() map[ipvs.Key]bool {
	out := map[ipvs.Key]bool{}
	for k := range f.foreign {
		if !f.adopting || f.met[k] || f.opts.excluded(k) {
			out[k] = true
		}
	}
	return out
}

// remarkOnOthers tells which addresses of the node do not serve a Service's node port.
func (f *family) remarkOnOthers(r *rendered) {
	for _, i := range r.items {
		if i.Kind == table.Services && i.Chain == table.ChainOthers {
			k := ipvs.ByAddr(ipvs.Protocol(i.Proto), netip.AddrPortFrom(i.Address(f.fam), i.Port))
			f.remarks.Say(r.sp.ID, remark.Taken, true, fmt.Sprintf("%s: the node port is left to it on this address", isForeign(k)))
		}
	}
}

// leftToOthers lists the virtual servers of others to which node ports are left.
func (f *family) leftToOthers() []ipvs.Key {
	var out []ipvs.Key
	for k := range f.settings.others {
		if k.Mark != 0 {
			continue
		}
		c, _ := f.elements.Wanted(table.At(table.Services, plan.Protocol(k.Protocol), k.Addr))
		if c.Chain == table.ChainOthers {
			out = append(out, k)
		}
	}
	return out
}

// contested returns an error if somebody else has a virtual server where a Service
// port needs one that it cannot do without.
func (f *family) contested(sp *plan.ServicePort, s settings) error {
	if len(f.foreign) == 0 {
		return nil
	}
	for _, v := range s.render(&service{sp: sp}).servers {
		e, taken := f.foreign[v.Key]
		if !taken {
			continue
		}
		if s.others[v.Key] {
			return isForeign(v.Key)
		}
		f.adopt(e)
	}
	return nil
}

func isForeign(k ipvs.Key) error {
	return fmt.Errorf("virtual server %s is there and was not made by svcproxy: delete it (ipvsadm -D) or give the Service another address or port", k)
}

// meet notes that somebody else has made a virtual server that a Service port needs since
// the kernel was read, and takes it out of the record of ours, which is written before
// virtual servers are made.
func (f *family) meet(k ipvs.Key) {
	f.met[k] = true
	e := recordOf(k)
	if content, recorded := f.elements.Exists(e); recorded {
		f.add(nft.Op{Kind: nft.DeleteElements, Set: e.Kind.Set(f.fam), Elements: []nft.Element{e.Encode(f.fam, content)}})
		f.elements.Gone(e)
	}
}

// recordOf is the element that says that a virtual server is ours.
func recordOf(k ipvs.Key) table.Element {
	if k.Mark != 0 {
		return table.Element{Kind: table.ServerMarks, Mark: k.Mark}
	}
	return table.At(table.Servers, plan.Protocol(k.Protocol), k.Addr)
}

// excluded reports whether a virtual server is in a range that is not to be touched.
func (o Options) excluded(k ipvs.Key) bool {
	return k.Mark == 0 && slices.ContainsFunc(o.Exclude, func(p netip.Prefix) bool { return p.Contains(k.Addr.Addr()) })
}

// adopt takes a virtual server as ours.
func (f *family) adopt(e ipvs.Entry) {
	delete(f.foreign, e.Key)
	f.servers.Have(e.Key, e.VirtualServer)
	for _, r := range e.Real {
		f.reals.Have(realKey{e.Key, r.Addr}, real{r.Weight, r.Forwarding})
	}
}
