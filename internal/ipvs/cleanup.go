package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/svcproxy/svcproxy/internal/ipvs/hostfilter"

	"github.com/svcproxy/svcproxy/internal/dataplane"
	"github.com/svcproxy/svcproxy/internal/ipvs/leftover"
	"github.com/svcproxy/svcproxy/internal/ipvs/table"
	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/sys/host"
	"github.com/svcproxy/svcproxy/internal/sys/ipvs"
	"github.com/svcproxy/svcproxy/internal/sys/nft"
)

// cleanup removes our virtual servers, the device, the routes and the tables, whatever
// families are configured. Virtual servers are ours if the table says so, or if their
// address is on the device, as kube-proxy's are. The tables go first: from then on
// packets are another mode's, if one has taken over.
func cleanup(ctx context.Context, env dataplane.Env, o Options, k kernel) error {
	err := cleanupOwn(ctx, env, o, k, func(ipvs.Key) bool { return false })
	if _, none := k.device.Addrs(); !errors.Is(none, host.ErrNoDevice) {
		gone := k.device.Delete()
		if gone == nil {
			env.Log.Info("removed a device", "device", host.VIPDevice)
		}
		err = errors.Join(err, gone)
	}
	return errors.Join(err, leftover.RemoveSets(env.Log, k.sets), k.close())
}

// cleanupOwn removes our virtual servers but those to keep, and what a kube-proxy in this
// mode has not: tables, routes, and rules in the host's own filter.
func cleanupOwn(ctx context.Context, env dataplane.Env, o Options, k kernel, keep func(ipvs.Key) bool) error {
	servers, err := ourServers(ctx, o, k)
	servers = slices.DeleteFunc(servers, func(e ipvs.Entry) bool { return keep(e.Key) })
	errs := []error{err, removeTables(ctx, env, k), removeServers(env, k, servers)}
	if k.host != nil {
		for _, f := range plan.Families {
			errs = append(errs, hostfilter.Close(ctx, k.host(f)))
		}
	}
	entries, err := k.routing.List(ctx)
	errs = append(errs, err)
	for _, e := range entries {
		if e.OfIPVS() {
			errs = append(errs, k.routing.Delete(ctx, e))
		}
	}
	return errors.Join(errs...)
}

// removeTables deletes our tables.
func removeTables(ctx context.Context, env dataplane.Env, k kernel) error {
	var errs []error
	for _, f := range plan.Families {
		removed, err := nft.Remove(ctx, k.tables, table.Of(f))
		if removed {
			env.Log.Info("removed an nftables table", "table", table.Of(f))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// cleanupKubeProxy does the same, unless svcproxy is in this mode: then the device is its
// own, and what kube-proxy left besides are sets.
func cleanupKubeProxy(ctx context.Context, env dataplane.Env, o Options, k kernel) error {
	for _, f := range plan.Families {
		if exists, err := k.tables.Exists(ctx, table.Of(f)); exists || err != nil && !nft.Lacks(err) {
			return errors.Join(err, leftover.RemoveSets(env.Log, k.sets), k.close())
		}
	}
	return cleanup(ctx, env, o, k)
}

// ourServers lists our virtual servers.
func ourServers(ctx context.Context, o Options, k kernel) ([]ipvs.Entry, error) {
	if !k.hasServers() {
		return nil, nil
	}
	all, err := k.servers.Dump(ctx)
	if errors.Is(err, ipvs.ErrMissing) || err == nil && len(all) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	addrs, err := k.device.Addrs()
	if err != nil && !errors.Is(err, host.ErrNoDevice) {
		return nil, err
	}
	onDevice := map[netip.Addr]bool{}
	for _, a := range addrs {
		onDevice[a] = true
	}
	recorded := map[ipvs.Key]bool{}
	for _, fam := range plan.Families {
		held, err := k.tables.Read(ctx, table.Of(fam))
		if errors.Is(err, nft.ErrNoTable) || nft.Lacks(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for key := range recordedIn(fam, held) {
			recorded[key] = true
		}
	}
	kubeProxys, err := leftover.ReadNodePorts(k.sets)
	return slices.DeleteFunc(all, func(e ipvs.Entry) bool {
		return !recorded[e.Key] && !((onDevice[e.Addr.Addr()] || kubeProxys.Has(e.Key)) && !o.excluded(e.Key))
	}), err
}

// removeServers deletes virtual servers.
func removeServers(env dataplane.Env, k kernel, servers []ipvs.Entry) error {
	removed := 0
	var errs []error
	for i := range servers {
		if err := k.servers.DeleteServer(servers[i].Key); err != nil && !errors.Is(err, ipvs.ErrNoServer) {
			errs = append(errs, err)
			continue
		}
		removed++
	}
	if removed > 0 {
		env.Log.Info("removed virtual servers", "count", removed)
	}
	return errors.Join(errs...)
}

// inForce reports whether new flows may pass objects of the mode, ours or kube-proxy's.
func inForce(ctx context.Context, k kernel) (bool, error) {
	yes, err := takesFlows(ctx, k)
	return yes, errors.Join(err, k.close())
}

func takesFlows(ctx context.Context, k kernel) (bool, error) {
	left := false
	for _, f := range plan.Families {
		c, err := shape(ctx, k, f)
		if err != nil || c != nil && !table.IsGivenUp(c) {
			return err == nil, err
		}
		left = left || c != nil
	}
	addrs, err := k.device.Addrs()
	if errors.Is(err, host.ErrNoDevice) {
		err = nil
	}
	return !left && len(addrs) > 0, err
}

// shape reads a table without what grows; nil if there is none.
func shape(ctx context.Context, k kernel, f plan.Family) (*nft.Contents, error) {
	c, err := k.tables.ReadSome(ctx, table.Of(f), func(*nft.Set) bool { return false })
	if errors.Is(err, nft.ErrNoTable) || nft.Lacks(err) {
		return nil, nil
	}
	return c, err
}
