package planner_test

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"

	"github.com/svcproxy/svcproxy/internal/plan"
)

var update = flag.Bool("update", false, "rewrite the expectations in testdata/plan")

// world.yaml of every case: node alder, and the ranges of the cluster.
const alder = `
kind: Node
metadata: {name: alder, uid: node-1, labels: {topology.kubernetes.io/zone: z1}}
spec: {podCIDRs: [10.61.1.0/24, "2001:db8:61:1::/64"]}
status: {addresses: [{type: InternalIP, address: 192.0.2.11}, {type: InternalIP, address: "2001:db8:1::11"}]}
---
kind: ServiceCIDR
metadata: {name: kubernetes}
spec: {cidrs: [10.62.0.0/16, "2001:db8:62::/112"]}
`

// TestGolden runs the cases in testdata/plan. A case is a txtar archive whose files
// are steps, in order, by the ending of their names:
//
//	.settings  YAML of settings, over those in force
//	.yaml      Kubernetes objects to apply
//	.delete    objects to delete, a line each
//	.failing   results of health checks, a line each: namespace/name, an endpoint's
//	           address and port, and "fails" or "passes"
//	.plan      want: the Services and health-check ports of the plan
//	.node      want: its Node
//	.notes     want: all notes in force; where it is missing there must be none that
//	           warns
//	.flows     want: "FROM PROTO ADDR" and, behind "->", what Eval makes of it;
//	           FROM is pod, node, outside, or an address@interface
//	.ready     want: what Ready says is missing
//
// With -update the wanted text is written anew.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("../../testdata/plan/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no cases in testdata/plan (%v)", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) { runGolden(t, file) })
	}
}

func runGolden(t *testing.T, file string) {
	a, err := txtar.ParseFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(bytes.TrimSpace(a.Comment)) == 0 {
		t.Error("the case does not say what it shows")
	}
	w := newWorld(t, defaultSettings())
	w.apply([]byte(alder))
	w.synced()
	dirty, noted := true, false
	warnings := func() {
		if !noted && !dirty {
			for _, n := range w.planner.Why(func(n plan.Note) bool { return n.Warning }) {
				t.Errorf("unexpected %s", notesText([]plan.Note{n}))
			}
		}
	}
	for i := range a.Files {
		f := &a.Files[i]
		switch path.Ext(f.Name) {
		case ".settings", ".yaml", ".delete", ".failing":
			warnings()
			dirty, noted = true, false
			map[string]func([]byte){".settings": w.set, ".yaml": w.apply, ".delete": w.delete, ".failing": w.fail}[path.Ext(f.Name)](f.Data)
			continue
		}
		if dirty {
			w.sync()
			w.checkFresh()
			dirty = false
		}
		noted = noted || path.Ext(f.Name) == ".notes"
		have, ok := w.golden(path.Ext(f.Name), f.Data)
		if !ok {
			t.Fatalf("%s: unknown kind of file", f.Name)
		}
		if *update {
			f.Data = []byte(have)
		} else if want := string(f.Data); have != want {
			t.Errorf("%s:\n%s", f.Name, diff(want, have))
		}
	}
	warnings()
	if dirty {
		t.Error("the last step is not looked at")
	}
	if *update {
		if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// golden returns the text that a wanted file of the kind ext should have.
func (w *world) golden(ext string, data []byte) (string, bool) {
	switch ext {
	case ".plan":
		p := *w.plan()
		p.Node = nil
		return p.String(), true
	case ".node":
		return (&plan.Plan{Node: w.node}).String(), true
	case ".notes":
		return notesText(w.planner.Why(nil)), true
	case ".flows":
		return w.flows(data), true
	case ".ready":
		_, missing := w.planner.Ready()
		return strings.Join(append(missing, ""), "\n"), true
	}
	return "", false
}

// flows evaluates the left-hand sides of data.
func (w *world) flows(data []byte) string {
	var b strings.Builder
	for line := range strings.Lines(string(data)) {
		left, _, _ := strings.Cut(strings.TrimSpace(line), " ->")
		fmt.Fprintf(&b, "%s -> %s\n", left, plan.Eval(w.plan(), mustPacket(w.tb, left)))
	}
	return b.String()
}

// mustPacket reads "FROM PROTO ADDR".
func mustPacket(tb testing.TB, s string) plan.Packet {
	tb.Helper()
	f := strings.Fields(s)
	if len(f) != 3 {
		tb.Fatalf("%q: want FROM PROTO ADDR", s)
	}
	dst, err := netip.ParseAddrPort(f[2])
	if err != nil {
		tb.Fatalf("%q: %v", s, err)
	}
	pkt := plan.Packet{Dst: dst, Proto: map[string]plan.Protocol{"tcp": plan.TCP, "udp": plan.UDP, "sctp": plan.SCTP}[f[1]]}
	from, in, found := strings.Cut(f[0], "@")
	six := dst.Addr().Is6()
	switch from {
	case "pod":
		from, in = "10.61.1.250", "veth1"
		if six {
			from = "2001:db8:61:1::250"
		}
	case "node":
		from, in = "192.0.2.11", ""
		if six {
			from = "2001:db8:1::11"
		}
	case "outside":
		from, in = "198.51.100.7", "eth0"
		if six {
			from = "2001:db8:51::7"
		}
	default:
		if !found {
			tb.Fatalf("%q: FROM is pod, node, outside or address@interface", s)
		}
	}
	pkt.Src, pkt.In = netip.MustParseAddr(from), in
	return pkt
}

func newReader(b []byte) *bufio.Reader { return bufio.NewReader(bytes.NewReader(b)) }
