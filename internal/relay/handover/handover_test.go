package handover

import (
	"context"
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/plan"
	"github.com/svcproxy/svcproxy/internal/relay/balance"
)

// offer offers e and returns where.
func offer(t *testing.T, e Estate) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "offer")
	e.Log = slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		_ = Offer(ctx, path, e)
		close(ended)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	for end := time.Now().Add(10 * time.Second); ; {
		if c, err := net.Dial("unix", path); err == nil {
			c.Close()
			return path
		}
		if time.Now().After(end) {
			t.Fatal("nobody offers")
		}
	}
}

// descriptor returns one that reads what the name of a file is.
func descriptor(t *testing.T, content string) int {
	t.Helper()
	name := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

func read(t *testing.T, fd int) string {
	t.Helper()
	b := make([]byte, 64)
	n, err := unix.Pread(fd, b, 0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	return string(b[:n])
}

// Everything arrives, each descriptor with what it belongs to, and clients in order
// however many they are.
func TestEverythingArrives(t *testing.T) {
	name := func(i int) Name {
		return Name{Key: "web", Protocol: plan.UDP, Addr: netip.MustParseAddrPort("192.0.2.1:53"), Index: i}
	}
	var clients []balance.Sticky
	for i := range 3*stickyAtOnce + 7 {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		clients = append(clients, balance.Sticky{Client: a, Endpoint: netip.MustParseAddrPort("[2001:db8::1]:80"), Used: time.Unix(int64(i), 0).UTC()})
	}
	client := netip.MustParseAddrPort("198.51.100.7:4000")
	path := offer(t, Estate{
		Sockets: func() []Socket {
			return []Socket{{name(0), descriptor(t, "first")}, {name(1), descriptor(t, "second")}}
		},
		Stop: func(given []Socket) Rest {
			if len(given) != 2 {
				t.Errorf("stopped serving %d sockets, want 2", len(given))
			}
			return Rest{
				Flows:    []Flow{{Listener: name(1), Client: client, Local: name(1).Addr.Addr(), Endpoint: client, FD: descriptor(t, "flow")}},
				Affinity: []Affinity{{Listener: name(0), Clients: clients}},
			}
		},
	})
	in, err := Inherit(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	anyPort := name(1)
	anyPort.Addr = netip.AddrPortFrom(anyPort.Addr.Addr(), 0)
	for n, want := range map[Name]string{name(0): "first", anyPort: "second"} {
		if fd, ok := in.Take(n); !ok || read(t, fd) != want {
			t.Errorf("%v is not the %s", n, want)
		}
	}
	if _, ok := in.Take(name(0)); ok {
		t.Error("a socket was taken twice")
	}
	rest, err := in.Done()
	if err != nil {
		t.Fatal(err)
	}
	if len(rest.Flows) != 1 || rest.Flows[0].Client != client || rest.Flows[0].Listener != name(1) || read(t, rest.Flows[0].FD) != "flow" {
		t.Errorf("flows %+v", rest.Flows)
	}
	var got []balance.Sticky
	for _, a := range rest.Affinity {
		got = append(got, a.Clients...)
	}
	if !reflect.DeepEqual(got, clients) {
		t.Errorf("%d clients, want %d, or in another order", len(got), len(clients))
	}
}

// Who offers nonsense is left alone.
func TestNonsense(t *testing.T) {
	for what, sent := range map[string][]byte{
		"a message without an end": binary.BigEndian.AppendUint32(nil, longest+1),
		"no message":               append(binary.BigEndian.AppendUint32(nil, 3), "abc"...),
		"half of one":              {0, 0},
		"nothing":                  {},
	} {
		path := filepath.Join(t.TempDir(), "offer")
		ln, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			c, err := ln.Accept()
			if err == nil {
				_, _ = c.Write(sent)
				_ = c.(*net.UnixConn).CloseWrite()
				_, _ = c.Read(make([]byte, 1))
				_, _ = c.Read(make([]byte, 1))
				c.Close()
			}
		}()
		if in, err := Inherit(context.Background(), path); err == nil {
			t.Errorf("%s: inherited %v", what, in)
		}
		ln.Close()
	}
}

// An offer outlives who asks for what there is not.
func TestWhoAsksForNonsenseGetsNothing(t *testing.T) {
	path := offer(t, Estate{Sockets: func() []Socket { return nil }, Stop: func([]Socket) Rest { return Rest{} }})
	for _, asked := range []string{"", "x", "R"} {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte(asked))
		_ = c.(*net.UnixConn).CloseWrite()
		if n, _ := c.Read(make([]byte, 1)); n > 0 {
			t.Errorf("%q was answered", asked)
		}
		c.Close()
	}
	in, err := Inherit(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.Done(); err != nil {
		t.Error(err)
	}
}
