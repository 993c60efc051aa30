//go:build chaos

package chaos

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	load "github.com/svcproxy/svcproxy/internal/scenario/flow"
)

var (
	services  = flag.Int("services", 0, "Services of TestSoak (10,000) and TestScale (50,000); 0: these tests are not run")
	endpoints = flag.Int("endpoints", 5, "endpoints of each Service")
	rounds    = flag.Int("rounds", 20, "rounds of TestSoak")
)

// crowd writes or deletes n Services of their own, each with a slice.
func (w *world) crowd(n int, present bool) {
	port, tcp, node := int32(8080), corev1.ProtocolTCP, "birch"
	for i := range n {
		name := fmt.Sprintf("crowd-%d", i)
		if !present {
			w.api.Delete("Service", "default", name)
			w.api.Delete("EndpointSlice", "default", name)
			continue
		}
		ip := fmt.Sprintf("10.62.%d.%d", 1+i/250, 1+i%250)
		w.put(&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []corev1.ServicePort{{Port: 80, Protocol: tcp}}},
		})
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &port, Protocol: &tcp}},
		}
		for e := range *endpoints {
			at := i**endpoints + e
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 64+at>>16, at>>8&255, at&255)}, NodeName: &node})
		}
		w.put(slice)
	}
}

// mustHold waits until the kernel has n Service ports and nothing is pending.
func (w *world) mustHold(n int, within time.Duration) time.Duration {
	w.t.Helper()
	start := time.Now()
	for deadline := start.Add(within); ; time.Sleep(20 * time.Millisecond) {
		if w.proxy.hasEnded() {
			w.t.Fatalf("the proxy has ended\n%s", w.tail())
		}
		have, ok := w.metric("svcproxy_services")
		if synced, _ := w.metric("svcproxy_synced"); ok && synced == 1 && int(have) == n && w.current() == nil {
			return time.Since(start)
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("%d Services are not in the kernel within %v: %v of them are known, %v", n, within, have, w.current())
		}
	}
}

// get reads a page of the metrics server.
func (w *world) get(path string) (string, error) {
	res, err := w.lab.Host("node").HTTPClient(load.Patient(30 * time.Second)).Get("http://127.0.0.1:10249" + path)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return string(text), err
}

func (w *world) metric(name string) (float64, bool) {
	text, err := w.get("/metrics")
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			return v, err == nil
		}
	}
	return 0, false
}

// heap is what is in use after collections, in bytes: what pools hold goes with the
// second one.
func (w *world) heap() uint64 {
	for range 2 {
		if _, err := w.get("/debug/pprof/heap?gc=1&debug=1"); err != nil {
			w.t.Fatal(err)
		}
	}
	text, err := w.get("/debug/pprof/heap?gc=1&debug=1")
	if err != nil {
		w.t.Fatal(err)
	}
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		if value, ok := strings.CutPrefix(s.Text(), "# HeapAlloc = "); ok {
			n, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				w.t.Fatal(err)
			}
			return n
		}
	}
	w.t.Fatal("the heap profile does not tell HeapAlloc")
	return 0
}

// objects counts what the kernel has of the mode's.
func (w *world) objects() string {
	count := `for c in "nft list ruleset" iptables-legacy-save ip6tables-legacy-save "ipvsadm -Ln" "ip -o address" "ip rule" "ip -6 rule" \
	"ip route show table all" "ip -6 route show table all" "ipset list" "ss -Hltun"; do
	echo "$c $($c 2>/dev/null | wc -l)"
done`
	out, err := w.lab.Host("node").Run(exec.Command("sh", "-c", count))
	if err != nil {
		w.t.Fatalf("%v: %s", err, out)
	}
	return out
}

// descriptors counts the open files of the process.
func (w *world) descriptors() int {
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", w.proxy.cmd.Process.Pid))
	if err != nil {
		w.t.Fatal(err)
	}
	return len(all)
}

// TestSoak is R-58: Services that come and go leave nothing behind, in the process and in
// the kernel.
func TestSoak(t *testing.T) {
	if *services == 0 {
		t.Skip("needs -services: see make soak and make scale")
	}
	binary := mustBuild(t)
	for _, mode := range strings.Split(*modes, ",") {
		t.Run(mode, func(t *testing.T) {
			w := mustWorld(t, binary, mode, rand.New(rand.NewPCG(*seed, 0)))
			base := len(w.alive)
			w.mustHold(base, time.Minute)
			w.mustBeRight("the start")
			objects := w.objects()
			var second uint64
			descriptors := w.descriptors()
			for round := 1; round <= *rounds; round++ {
				w.crowd(*services, true)
				took := w.mustHold(base+*services, 5*time.Minute)
				w.crowd(*services, false)
				w.mustHold(base, 5*time.Minute)
				w.mustBeRight("the Services have gone")
				heap := w.heap()
				t.Logf("%s: round %d: programmed in %v, heap %.1f MiB, %d descriptors", mode, round, took.Round(10*time.Millisecond), float64(heap)/(1<<20), w.descriptors())
				if n := w.descriptors(); n > descriptors+10 { // connections to the API server come and go
					t.Fatalf("round %d: %d open files, and there were %d", round, n, descriptors)
				}
				if have := w.objects(); have != objects {
					t.Fatalf("round %d: the kernel has %q lines, and had %q", round, have, objects)
				}
				if round == 2 {
					second = heap
				}
				// Maps settle at their size within some rounds; 2 MiB are 10 bytes for each
				// Service of the further 18.
				if round > 2 && round == *rounds && heap > second+2<<20 {
					t.Errorf("the heap grew from %d to %d bytes", second, heap)
				}
			}
			w.mustBeRight("the last round")
		})
	}
}

// TestScale reports what a large cluster costs.
func TestScale(t *testing.T) {
	if *services == 0 {
		t.Skip("needs -services: see make soak and make scale")
	}
	binary := mustBuild(t)
	for _, mode := range strings.Split(*modes, ",") {
		t.Run(mode, func(t *testing.T) {
			w := mustWorld(t, binary, mode, rand.New(rand.NewPCG(*seed, 0)))
			base := len(w.alive)
			w.mustHold(base, time.Minute)
			w.end(w.proxy, syscall.SIGTERM)
			w.crowd(*services, true)
			w.start()
			cold := w.mustHold(base+*services, 10*time.Minute)
			cpu := w.cpu()
			w.end(w.proxy, syscall.SIGTERM)
			w.start()
			warm := w.mustHold(base+*services, 10*time.Minute)
			before := w.cpu()
			warmCPU := before
			const look = 20 * time.Second
			time.Sleep(look)
			idle := w.cpu() - before
			t.Logf("%s: %d Services, %d endpoints: cold start %v (CPU %v), start with rules in force %v (CPU %v), RSS %s, idle %.2f %% of a CPU",
				mode, *services, *services**endpoints, cold.Round(10*time.Millisecond), cpu.Round(10*time.Millisecond), warm.Round(10*time.Millisecond), warmCPU.Round(10*time.Millisecond), w.rss(), 100*idle.Seconds()/look.Seconds())
		})
	}
}

// cpu is what the process has used.
func (w *world) cpu() time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", w.proxy.cmd.Process.Pid))
	if err != nil {
		w.t.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+2:]))
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}

func (w *world) rss() string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", w.proxy.cmd.Process.Pid))
	if err != nil {
		w.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			return strings.TrimSpace(v)
		}
	}
	return "?"
}
