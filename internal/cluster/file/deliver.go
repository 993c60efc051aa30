package file

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// merge decides which object of each name is in force: the first, by file name and
// document. It also returns all that is wrong.
func (s *Source) merge() (map[objectKey]*object, []finding) {
	inForce := make(map[objectKey]*object, len(s.delivered))
	at := make(map[objectKey]string, len(s.delivered))
	var found []finding
	for _, path := range slices.Sorted(maps.Keys(s.files)) {
		m := s.files[path]
		if m.unread != nil {
			found = append(found, *m.unread)
		}
		for i := range m.documents {
			d := &m.documents[i]
			found = append(found, d.findings...)
			for _, o := range d.objects {
				if first, twice := at[o.key]; twice {
					found = append(found, finding{content: d.content, Problem: Problem{
						File: path, Document: d.number, Line: d.line, Object: o.key.String(), Field: "metadata.name",
						Reason: "given twice: rename or remove one", Effect: "the one in " + first + ", is in force",
					}})
					continue
				}
				inForce[o.key], at[o.key] = o, place(path, d.number)
			}
		}
		for i := range m.documents {
			d := &m.documents[i]
			for _, o := range d.leftover {
				if inForce[o.key] == nil {
					inForce[o.key], at[o.key] = o, place(path, d.number)
				}
			}
		}
	}
	return inForce, found
}

func (s *Source) hasOtherNodes() bool {
	for _, m := range s.files {
		if slices.ContainsFunc(m.documents, func(d document) bool { return d.otherNodes }) {
			return true
		}
	}
	return false
}

// deliver hands over what differs from what was handed over before, in the order
// in which nothing is missing meanwhile: endpoints before their Service, what is
// new before what goes.
func (s *Source) deliver(to cluster.Sink, inForce map[objectKey]*object) {
	var node *cluster.Node
	var prefixes []netip.Prefix
	var changed []*object
	for k, o := range inForce {
		if o.node != nil {
			node = o.node
		}
		prefixes = append(prefixes, o.cidrs...)
		if s.delivered[k] != o {
			changed = append(changed, o)
		}
	}
	to.SetNode(node)
	to.SetServiceCIDRs(prefixes)
	slices.SortFunc(changed, func(a, b *object) int { return a.key.compare(b.key) })
	for _, o := range changed {
		o.hand(to, s.delivered[o.key])
	}
	for k, o := range s.delivered {
		if inForce[k] != nil {
			continue
		}
		if o.service != nil {
			to.DeleteService(k.name)
		}
		for _, sl := range o.slices {
			to.DeleteSlice(sl.Name)
		}
	}
	s.delivered = inForce
}

// hand delivers an object in the place of old, which may be nil. An object that
// comes back into force is handed over as a copy: the State owns the first one.
func (o *object) hand(to cluster.Sink, old *object) {
	if o.service != nil {
		svc := o.service
		if o.handed {
			c := *svc
			svc = &c
		}
		to.SetService(svc)
	}
	kept := make(map[cluster.Name]struct{}, len(o.slices))
	for _, sl := range o.slices {
		kept[sl.Name] = struct{}{}
		if o.handed {
			c := *sl
			sl = &c
		}
		to.SetSlice(sl)
	}
	if old != nil {
		for _, sl := range old.slices {
			if _, ok := kept[sl.Name]; !ok {
				to.DeleteSlice(sl.Name)
			}
		}
	}
	o.handed = true
}
