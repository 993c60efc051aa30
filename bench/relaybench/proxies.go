package relaybench

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay"
)

// ours relays by internal/relay, with one processor more than there are, as userspace
// mode has it.
func ours(ctx context.Context, from, to netip.Addr, ready io.Writer) error {
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1)
	r := relay.New(relay.Options{Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), UDPTimeout: 10 * time.Second})
	if err := r.Start(); err != nil {
		return err
	}
	for _, p := range []struct {
		protocol plan.Protocol
		port     uint16
	}{{plan.TCP, echoPort}, {plan.TCP, sourcePort}, {plan.UDP, udpPort}} {
		s := r.NewService(fmt.Sprintf("bench/%d", p.port))
		sp := &plan.ServicePort{ID: plan.ID{Namespace: "bench", Name: fmt.Sprint(p.port), Protocol: p.protocol, Family: plan.IPv4}}
		sp.Pools[plan.Cluster] = []plan.Endpoint{{Addr: netip.AddrPortFrom(to, p.port), Weight: 1}}
		s.Update(sp)
		router := func(relay.Flow) (*relay.Service, plan.Route) { return s, plan.Route{SNAT: true} }
		if _, err := r.Listen(relay.ListenConfig{Protocol: p.protocol, Addr: netip.AddrPortFrom(from, p.port), Router: router}); err != nil {
			return err
		}
	}
	stopProfile, err := startProfile()
	if err != nil {
		return err
	}
	defer stopProfile()
	fmt.Fprintln(ready, "ready")
	<-ctx.Done()
	now, cancel := context.WithCancel(context.Background())
	cancel()
	_ = r.Shutdown(now)
	return nil
}

// profileVariable names the directory for CPU profiles in the environment of our relay.
const profileVariable = "RELAY_PROFILE"

// startProfile writes a CPU profile if that is asked for, a file for each process.
func startProfile() (func(), error) {
	dir := os.Getenv(profileVariable)
	if dir == "" {
		return func() {}, nil
	}
	f, err := os.Create(filepath.Join(dir, fmt.Sprintf("relay-%d.pprof", os.Getpid())))
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, err
	}
	return func() {
		pprof.StopCPUProfile()
		_ = f.Close()
	}, nil
}

// naive is what one writes first in Go: a goroutine for each direction with io.Copy,
// which splices, and one call for each datagram.
func naive(ctx context.Context, from, to netip.Addr, ready io.Writer) error {
	failed := make(chan error, 3)
	for _, port := range []uint16{echoPort, sourcePort} {
		ln, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, port)))
		if err != nil {
			return err
		}
		go func() { failed <- naiveTCP(ln, netip.AddrPortFrom(to, port)) }()
	}
	in, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, udpPort)))
	if err != nil {
		return err
	}
	_ = in.SetReadBuffer(4 << 20)
	go func() { failed <- naiveUDP(in, netip.AddrPortFrom(to, udpPort)) }()
	fmt.Fprintln(ready, "ready")
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		return nil
	}
}

func naiveTCP(ln *net.TCPListener, to netip.AddrPort) error {
	for {
		client, err := ln.AcceptTCP()
		if err != nil {
			return err
		}
		go func() {
			defer client.Close()
			endpoint, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(to))
			if err != nil {
				return
			}
			defer endpoint.Close()
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, _ = io.Copy(endpoint, client)
				_ = endpoint.CloseWrite()
			}()
			_, _ = io.Copy(client, endpoint)
			_ = client.CloseWrite()
			<-done
		}()
	}
}

func naiveUDP(in *net.UDPConn, to netip.AddrPort) error {
	flows := map[netip.AddrPort]*net.UDPConn{} // never forgotten
	buf := make([]byte, 64<<10)
	for {
		n, client, err := in.ReadFromUDPAddrPort(buf)
		if err != nil {
			return err
		}
		out := flows[client]
		if out == nil {
			if out, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(to)); err != nil {
				return err
			}
			flows[client] = out
			go func() {
				answer := make([]byte, 64<<10)
				for {
					n, err := out.Read(answer)
					if err != nil {
						return
					}
					_, _ = in.WriteToUDPAddrPort(answer[:n], client)
				}
			}()
		}
		_, _ = out.Write(buf[:n])
	}
}

// haproxyConfig is TCP mode with splicing, a thread for each processor, and what its
// documentation advises for that: larger pipes, and no logging.
func haproxyConfig(from, to netip.Addr) string {
	var b strings.Builder
	b.WriteString(`global
	maxconn 9600
	nbthread 2
	maxpipes 200
	tune.pipesize 1048576
defaults
	mode tcp
	option splice-auto
	option tcp-smart-accept
	option tcp-smart-connect
	timeout connect 5s
	timeout client 10m
	timeout server 10m
`)
	for _, port := range []int{echoPort, sourcePort} {
		fmt.Fprintf(&b, "listen p%d\n\tbind %s:%d backlog 65535\n\tserver s %s:%d\n", port, from, port, to, port)
	}
	return b.String()
}

// raiseLimit allows this process all descriptors that it may have.
func raiseLimit() error {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	if err == nil {
		limit.Cur = limit.Max
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	}
	if err != nil {
		return fmt.Errorf("raising the limit of descriptors: %w", err)
	}
	return nil
}

// role runs one of the processes of a measurement.
func role(ctx context.Context, args []string, stdout io.Writer) error {
	if err := raiseLimit(); err != nil {
		return err
	}
	addr := func(i int) netip.Addr { return netip.MustParseAddr(args[i]) }
	switch {
	case len(args) == 2 && args[0] == "server":
		return serve(ctx, addr(1), stdout)
	case len(args) == 3 && args[0] == "svcproxy":
		return ours(ctx, addr(1), addr(2), stdout)
	case len(args) == 3 && args[0] == "naive":
		return naive(ctx, addr(1), addr(2), stdout)
	case len(args) == 5 && args[0] == "load":
		var threads int
		var d time.Duration
		if _, err := fmt.Sscan(args[3], &threads); err != nil {
			return fmt.Errorf("threads %q: %w", args[3], err)
		}
		d, err := time.ParseDuration(args[4])
		if err != nil {
			return err
		}
		return load(args[1], addr(2), threads, d, stdout)
	}
	return fmt.Errorf("unknown role %q", args)
}
