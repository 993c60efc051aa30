//go:build chaos

package chaos

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	load "github.com/svcproxy/svcproxy/internal/scenario/flow"
)

// pause lets what was done act for a random moment. It is part of what happens, and
// nothing is concluded from its length.
func (w *world) pause(most time.Duration) {
	time.Sleep(time.Duration(w.random.Int64N(int64(most))))
}

// lose says that from now on rules may be missing, until the kernel equals the plan
// again. What fails in between does not count.
func (w *world) lose() {
	if w.lost.IsZero() {
		w.lost = time.Now()
	}
}

// loseProcess is lose where the process itself carries the connections.
func (w *world) loseProcess() {
	if w.mode == "userspace" {
		w.lose()
	}
}

func (w *world) kill() {
	w.loseProcess()
	w.end(w.proxy, syscall.SIGKILL)
	w.pause(200 * time.Millisecond)
	w.start()
}

func (w *world) restart() {
	w.loseProcess()
	w.end(w.proxy, syscall.SIGTERM)
	w.churn()
	w.start()
	w.pause(300 * time.Millisecond)
}

// succeed starts a second proxy beside the first and ends that one once the second has
// everything in the kernel, as an upgrade does; a successor that does not get there is
// taken away again.
func (w *world) succeed() {
	if w.proxy.hasEnded() { // at its start, while kernel calls fail
		return
	}
	w.api.Silence(false)
	w.api.Delay(0)
	old, before := w.proxy, w.synced()
	w.start()
	leaves := old
	if !w.awaitSync(before) {
		leaves, w.proxy = w.proxy, old
	}
	w.end(leaves, syscall.SIGTERM)
	w.churn()
}

// synced counts the proxies that had everything in the kernel once.
func (w *world) synced() int {
	b, err := os.ReadFile(w.path("log"))
	if err != nil {
		w.t.Fatal(err)
	}
	return bytes.Count(b, []byte("first sync done"))
}

// awaitSync waits for one more, and reports whether it came.
func (w *world) awaitSync(before int) bool {
	return load.Eventually(10*time.Second, func() error {
		switch {
		case w.synced() > before:
			return nil
		case w.proxy.hasEnded():
			return load.Final(errors.New("it has ended"))
		}
		return errors.New("not yet")
	}) == nil
}

func (w *world) freeze() {
	w.loseProcess()
	_ = w.proxy.cmd.Process.Signal(syscall.SIGSTOP)
	w.churn()
	w.pause(time.Second)
	_ = w.proxy.cmd.Process.Signal(syscall.SIGCONT)
}

func (w *world) restartAPI() {
	if err := w.api.Stop(); err != nil {
		w.t.Fatal(err)
	}
	w.churn()
	w.pause(time.Second)
	w.listen()
}

func (w *world) silence() {
	w.api.Silence(true)
	w.churn()
	w.pause(2 * time.Second)
}

func (w *world) disconnect() {
	w.api.Disconnect()
	w.churn()
}

func (w *world) slow() {
	w.api.Delay(time.Duration(w.random.Int64N(int64(time.Second))))
	w.churn()
	w.pause(time.Second)
}

// failWrites lets a share of the writes fail: commits of nftables by the tag faults, the
// iptables programs by others of their name in front of them.
func (w *world) failWrites() {
	w.write("faults", fmt.Sprintf("%.2f", 0.3+0.7*w.random.Float64()))
	for range 3 {
		w.churn()
		w.pause(300 * time.Millisecond)
	}
}

// flush does what a firewall service does that reloads, or an administrator in despair.
func (w *world) flush() {
	commands := []string{"nft flush ruleset", "iptables -t nat -F", "iptables-legacy -t nat -F; iptables-nft -t nat -F; iptables-nft -F",
		"nft delete table ip svcproxy || true"}
	switch w.mode {
	case "ipvs":
		commands = append(commands, "ipvsadm -C", "ip link delete kube-ipvs0", "ip address flush dev kube-ipvs0", "ip rule delete pref 115")
	case "userspace":
		commands = append(commands, "ip rule delete pref 90", "ip route flush table all proto 115")
	}
	w.lose()
	w.run(commands[w.random.IntN(len(commands))])
}

// changeAddress gives the node an address or takes it.
func (w *world) changeAddress() {
	a := fmt.Sprintf("198.18.0.%d", 1+w.random.IntN(5))
	node, err := w.lab.Host("node"), error(nil)
	if w.addrs[a] {
		err = node.DelAddr("eth0", netip.MustParseAddr(a))
	} else {
		err = node.AddAddr("eth0", netip.MustParsePrefix(a+"/32"))
	}
	if err != nil {
		w.t.Fatal(err)
	}
	w.addrs[a] = !w.addrs[a]
}

// cutLink takes the link of a pod that is none of the steady Service's.
func (w *world) cutLink() {
	dev := "veth-" + podName(1+w.random.IntN(pods-1))
	node := w.lab.Host("node")
	if err := node.Cut(dev); err != nil {
		w.t.Fatal(err)
	}
	w.churn()
	w.pause(300 * time.Millisecond)
	if err := node.Join(dev); err != nil {
		w.t.Fatal(err)
	}
}

// churn changes some Services other than the steady one.
func (w *world) churn() {
	for range 1 + w.random.IntN(6) {
		w.churnOne(1 + w.random.IntN(39))
	}
}

func (w *world) churnOne(n int) {
	if w.alive[n] && w.random.IntN(4) == 0 {
		name := fmt.Sprintf("svc-%d", n)
		w.api.Delete("Service", "default", name)
		w.api.Delete("EndpointSlice", "default", name)
		delete(w.alive, n)
		return
	}
	var endpoints []int
	for i := range 2 * pods {
		if i != 0 && i != pods && w.random.IntN(3) == 0 {
			endpoints = append(endpoints, i)
		}
	}
	w.service(n, 10+n, endpoints...)
}

// jump sets the clock some hours away, and back when it is calm.
func (w *world) jump() {
	hours := time.Duration(w.random.IntN(48)-24) * time.Hour
	w.setClock(time.Now().Add(hours))
	w.churn()
	w.pause(time.Second)
	w.setClock(time.Now().Add(-hours))
}

func (w *world) setClock(to time.Time) {
	tv := unix.NsecToTimeval(to.UnixNano())
	if err := unix.Settimeofday(&tv); err != nil {
		w.t.Fatalf("set the clock: %v", err)
	}
}

// calm takes back what would go on. A proxy that could not start because the kernel
// refused everything is started again, as whoever supervises it does.
func (w *world) calm() {
	failing := os.Remove(w.path("faults")) == nil
	switch {
	case failing && w.proxy.hasEnded():
		w.start()
	case failing && w.mode == "userspace":
		// A trial that failed at the start has it do without nf_tables until the next.
		w.restart()
	}
	w.api.Silence(false)
	w.api.Delay(0)
	_ = w.proxy.cmd.Process.Signal(syscall.SIGCONT)
}

// run runs a shell command on the node; that it fails is no matter.
func (w *world) run(command string) {
	if out, err := w.lab.Host("node").Run(exec.Command("sh", "-c", command)); err != nil {
		w.t.Logf("%s: %v: %s", command, err, out)
	}
}
