package iptables

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// inNamespace runs the rest of the test in a process of its own, in a new network
// namespace; it returns false in the process that has to do nothing more.
func inNamespace(t *testing.T) bool {
	t.Helper()
	const inside = "IPTABLES_TEST_NAMESPACE"
	if os.Getenv(inside) == t.Name() {
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root for a network namespace")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if strings.Contains(string(out), "--- SKIP") {
		t.Skipf("inside: %s", out)
	}
	return false
}

// kernelTables returns the tables of both stores.
func kernelTables(t *testing.T, f Family) []Tables {
	t.Helper()
	all, err := NewFinder(func(Table, string) bool { return false }, nil).All(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 2 {
		t.Fatalf("programs for %d stores, want 2: install the package iptables", len(all))
	}
	return all
}

func restore(tables Tables, input string) error {
	return tables.Restore(context.Background(), func(w *bufio.Writer) error {
		_, err := w.WriteString(input)
		return err
	})
}

func listed(t *testing.T, tables Tables) string {
	t.Helper()
	var b strings.Builder
	for _, table := range []Table{NAT, Filter, Mangle} {
		var lines []string
		err := tables.Save(t.Context(), table, func(line []byte) error {
			s := string(line)
			if name, policy, ok := strings.Cut(s, " "); ok && s[0] == ':' {
				s = name + " " + strings.Fields(policy)[0] // without counters
			}
			lines = append(lines, s)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if len(lines) > 1+len(table.Builtin()) { // an empty table may exist or not
			b.WriteString(strings.Join(lines, "\n") + "\n")
		}
	}
	return b.String()
}

// The fake does what both stores of the kernel do, and prints it alike.
func TestFakeIsHonest(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	inputs := []string{
		"*nat\n:B - [0:0]\n:A - [0:0]\n-A A -j B\n-A PREROUTING -m comment --comment \"to A\" -j A\nCOMMIT\n",
		"*nat\n:C - [0:0]\n-A A -s 10.0.0.1/32 -j C\n-I A -j C\n-I PREROUTING -j C\nCOMMIT\n*filter\n:A - [0:0]\n-A FORWARD -j A\nCOMMIT\n",
		"*nat\n-X B\nCOMMIT\n",                              // in use
		"*nat\n-A NOWHERE -j A\nCOMMIT\n",                   // no such chain
		"*nat\n-A A -j NOWHERE\nCOMMIT\n",                   // no such target
		"*nat\n-D A -s 10.9.9.9/32 -j C\nCOMMIT\n",          // no such rule
		"*filter\n:D - [0:0]\nCOMMIT\n*nat\n-X B\nCOMMIT\n", // the first part stays
		"*nat\n:A - [0:0]\nCOMMIT\n",                        // flushed
		"*nat\n-D PREROUTING -m comment --comment \"to A\" -j A\n:B - [0:0]\n-X A\n-X B\nCOMMIT\n",
		"*mangle\n:M - [0:0]\n-A OUTPUT -g M\nCOMMIT\n",
		"*nat\n-F PREROUTING\nCOMMIT\n",
		"*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n",
		"*nat\n:A234567890123456789012345678 - [0:0]\nCOMMIT\n",
		"*nat\n:A2345678901234567890123456789 - [0:0]\nCOMMIT\n", // too long
		"*filter\n-F\n-X\nCOMMIT\n",
	}
	inputs = inputs[:len(inputs)-1] // flushing a whole table is not in the fake's language
	for _, f := range []Family{IPv4, IPv6} {
		for _, kernel := range kernelTables(t, f) {
			fake := NewFake(f, kernel.Store())
			for i, in := range inputs {
				if f == IPv6 {
					in = strings.NewReplacer("10.0.0.1/32", "2001:db8::1/128", "10.9.9.9/32", "2001:db8::9/128").Replace(in)
				}
				kerr, ferr := restore(kernel, in), restore(fake, in)
				if (kerr == nil) != (ferr == nil) {
					t.Fatalf("%s %s, input %d %q: kernel %v, fake %v", kernel.Store(), f, i, in, kerr, ferr)
				}
				var re *RestoreError
				if kerr != nil && !errors.As(kerr, &re) {
					t.Errorf("%s %s, input %d: %v is no RestoreError", kernel.Store(), f, i, kerr)
				}
				if have, want := listed(t, fake), listed(t, kernel); have != want {
					t.Fatalf("%s %s, after input %d %q:\nfake:\n%s\nkernel:\n%s", kernel.Store(), f, i, in, have, want)
				}
			}
			if err := restore(kernel, "*nat\n-F\n-X\nCOMMIT\n*filter\n-F\n-X\nCOMMIT\n*mangle\n-F\n-X\nCOMMIT\n"); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A bad rule's line is known; what only the kernel refuses is an error all the same,
// with a line where the store has one.
func TestRestoreErrorsNameTheLine(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	for _, kernel := range kernelTables(t, IPv4) {
		err := restore(kernel, "*nat\n:A - [0:0]\n-A A -p tcp -j DNAT --to-destination 10.0.0.1:99999\nCOMMIT\n")
		var re *RestoreError
		if !errors.As(err, &re) || re.Line != 3 || re.Busy {
			t.Errorf("%s: %v, want a refusal of line 3", kernel.Store(), err)
		}
		err = restore(kernel, "*filter\n:A - [0:0]\n-A A -j RETURN\n-A A -j MASQUERADE\n-A A -j RETURN\nCOMMIT\n")
		want := map[Store]int{Legacy: 6, NFT: 4}[kernel.Store()]
		if !errors.As(err, &re) || re.Line != want || re.Busy {
			t.Errorf("%s: %v, want a refusal of line %d", kernel.Store(), err, want)
		}
	}
}

// Watch tells of others' writes, and not of our own.
func TestWatchTellsOfOthers(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	for _, kernel := range kernelTables(t, IPv4) {
		t.Run(kernel.Store().String(), func(t *testing.T) {
			mine := "*nat\n:KUBE-A - [0:0]\n:KUBE-B - [0:0]\n-A KUBE-A -j KUBE-B\n-A PREROUTING -j KUBE-A\nCOMMIT\n*filter\n:KUBE-A - [0:0]\nCOMMIT\n"
			if err := restore(kernel, mine); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			told := make(chan string, 100)
			go func() {
				_ = kernel.Watch(ctx, func(c string) bool { return strings.HasPrefix(c, "KUBE-") }, func() {}, func(what string) { told <- what })
			}()
			other := NewCommand(IPv4, kernel.Store(), kernel.(*Command).save, kernel.(*Command).restore, nil)
			expect := func(what string, do func() error) {
				t.Helper()
				for { // until Watch has begun
					if err := do(); err != nil {
						t.Fatalf("%s: %v", what, err)
					}
					select {
					case <-told:
						for len(told) > 0 {
							<-told
						}
						return
					case <-time.After(2 * time.Second):
					case <-ctx.Done():
						t.Fatalf("%s: not noticed", what)
					}
					if err := restore(kernel, mine); err != nil {
						t.Fatal(err)
					}
				}
			}
			expect("a flush", func() error { return restore(other, "*nat\n-F KUBE-A\nCOMMIT\n") })
			for i := range 5 {
				if err := restore(kernel, fmt.Sprintf("*nat\n:KUBE-A - [0:0]\n-A KUBE-A -s 10.0.0.%d/32 -j KUBE-B\nCOMMIT\n", i)); err != nil {
					t.Fatal(err)
				}
			}
			if kernel.Store() == NFT { // others' chains are not our business; a legacy table only has a size
				if err := restore(other, "*nat\n:FOREIGN - [0:0]\n-A FOREIGN -j RETURN\nCOMMIT\n"); err != nil {
					t.Fatal(err)
				}
			}
			// What comes next is told, and nothing came before.
			if err := restore(other, "*nat\n-F PREROUTING\nCOMMIT\n"); err != nil {
				t.Fatal(err)
			}
			select {
			case what := <-told:
				if kernel.Store() == NFT && !strings.Contains(what, "PREROUTING") {
					t.Errorf("told %q, want the flush of PREROUTING", what)
				}
			case <-ctx.Done():
				t.Error("the flush of PREROUTING was not noticed")
			}
			if kernel.Store() == NFT {
				expect("nft flush ruleset", func() error { return exec.Command("nft", "flush", "ruleset").Run() })
			}
		})
	}
}

// The lock that others hold is waited for, and the wait is reported.
func TestLockIsShared(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	lock, err := os.OpenFile(lockFile, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	waited := make(chan time.Duration, 1)
	legacy := kernelTables(t, IPv4)[0].(*Command)
	c := NewCommand(IPv4, Legacy, legacy.save, legacy.restore, func(d time.Duration) { waited <- d })
	done := make(chan error, 1)
	go func() { done <- restore(c, "*nat\n:A - [0:0]\nCOMMIT\n") }()
	select {
	case err := <-done:
		t.Fatalf("a restore passes the lock: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if d := <-waited; d <= 0 {
		t.Errorf("reported wait %v", d)
	}
}

// Both stores tell how many packets a chain dropped.
func TestDroppedPacketsAreCounted(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, tables := range kernelTables(t, IPv4) {
		c := tables.(*Command)
		if _, err := c.Dropped(t.Context(), "TEST-DROPS"); err == nil {
			t.Errorf("%s: a chain that is not there is counted", c.Store())
		}
		if err := restore(c, "*filter\n:TEST-DROPS - [0:0]\n-A OUTPUT -p udp -m udp --dport 9 -j TEST-DROPS\n"+
			"-A TEST-DROPS -d 127.0.0.2/32 -j DROP\n-A TEST-DROPS -d 127.0.0.3/32 -j DROP\n-A TEST-DROPS -j RETURN\nCOMMIT\n"); err != nil {
			t.Fatal(err)
		}
		for _, to := range []string{"127.0.0.2:9", "127.0.0.3:9", "127.0.0.3:9", "127.0.0.4:9"} {
			conn, err := net.Dial("udp4", to)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = conn.Write([]byte("x")) // the sender of a dropped packet may be told so
			conn.Close()
		}
		if n, err := c.Dropped(t.Context(), "TEST-DROPS"); err != nil || n != 3 {
			t.Errorf("%s: %d packets dropped, %v, want 3", c.Store(), n, err)
		}
		if err := restore(c, "*filter\n-D OUTPUT -p udp -m udp --dport 9 -j TEST-DROPS\n:TEST-DROPS - [0:0]\n-X TEST-DROPS\nCOMMIT\n"); err != nil {
			t.Fatal(err)
		}
	}
}
