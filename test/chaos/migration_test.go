//go:build chaos

package chaos

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	load "github.com/svcproxy/svcproxy/internal/scenario/flow"
)

var kubeProxy = flag.String("kube-proxy", "", "a kube-proxy, which TestMigrationFromIPVS starts in ipvs mode; without, that is not run")

// TestMigrationFromIPVS takes Services over from a real kube-proxy in ipvs mode that runs,
// and gives them back, while requests go on: none fails, and nothing is left of whoever
// went. From kube-proxy's other modes, test/cluster does it, before a real API server.
func TestMigrationFromIPVS(t *testing.T) {
	if *kubeProxy == "" {
		t.Skip("needs -kube-proxy: see scripts/chaos-vm")
	}
	binary := mustBuild(t)
	for _, to := range strings.Split(*modes, ",") {
		t.Run(to, func(t *testing.T) { mustNode(t, binary, to, rand.New(rand.NewPCG(*seed, 0))).migrates() })
	}
}

func (w *world) migrates() {
	w.write("kube-proxy.yaml", fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ipvs
hostnameOverride: alder
clusterCIDR: 10.61.0.0/16
clientConnection: {kubeconfig: %q}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, w.path("kubeconfig")))
	old := w.startKubeProxy()
	w.startLoad()
	w.start()
	w.mustSay("first sync done")
	w.mustSay("reason=KubeProxyRunning")
	w.end(old, syscall.SIGTERM)
	w.mustSay("reason=KubeProxyEnded")
	w.mustBeRight("kube-proxy has ended")
	w.mustHaveNothingOfIPVS()
	w.endLoad("svcproxy had taken over")

	w.startLoad()
	w.end(w.proxy, syscall.SIGTERM)
	back := w.startKubeProxy()
	if out, err := w.lab.Host("node").Run(exec.Command(w.binary, "cleanup", "--keep-kube-proxy=ipvs")); err != nil {
		w.t.Errorf("clean-up: %v: %s", err, out)
	}
	if left := w.found("nft list tables | grep svcproxy; ip rule | grep svcproxy"); left != "" {
		w.t.Errorf("with kube-proxy back there is\n%s", left)
	}
	w.mustAnswer()
	w.endLoad("kube-proxy was back")
	w.end(back, syscall.SIGTERM)
}

// startKubeProxy starts it and waits until it serves.
func (w *world) startKubeProxy() *process {
	p := w.launch("kube-proxy.log", *kubeProxy, "--config="+w.path("kube-proxy.yaml"))
	w.t.Cleanup(func() {
		w.end(p, syscall.SIGKILL)
		if w.t.Failed() {
			b, _ := os.ReadFile(w.path("kube-proxy.log"))
			w.t.Logf("kube-proxy said last:\n%s", b[max(0, len(b)-3000):])
		}
	})
	w.mustAnswer()
	// What asked before anybody served has left entries that say so, for two minutes.
	w.run("conntrack -F 2>&1")
	return p
}

// mustAnswer waits until the steady Service answers ten times in turn.
func (w *world) mustAnswer() {
	w.t.Helper()
	to := lab.Dialing{Proto: lab.TCP, To: netip.MustParseAddrPort(steady)}
	err := load.Eventually(time.Minute, func() error {
		for range 10 {
			if s := load.Attempt(w.lab.Host("probe"), to, time.Second); s.End != lab.Answered {
				return fmt.Errorf("%s: %s", steady, s)
			}
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// mustSay waits for a line of the proxy's log.
func (w *world) mustSay(text string) {
	w.t.Helper()
	err := load.Eventually(time.Minute, func() error {
		if b, err := os.ReadFile(w.path("log")); err != nil || !strings.Contains(string(b), text) {
			return fmt.Errorf("the proxy does not say %q (%w)", text, err)
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// found returns what a shell command prints on the node.
func (w *world) found(command string) string {
	out, _ := w.lab.Host("node").Run(exec.Command("sh", "-c", command))
	return out
}

// mustHaveNothingOfIPVS waits until nothing of kube-proxy's is left but what this mode
// has taken over, and virtual servers for node ports: these are on the node's own
// addresses, as an administrator's may be, and stay.
func (w *world) mustHaveNothingOfIPVS() {
	w.t.Helper()
	look := "ipset list -n"
	if w.mode != "iptables" {
		look += "; iptables-save | grep KUBE-"
	}
	if w.mode != "ipvs" {
		look += "; ipvsadm -Ln | grep '^[A-Z]*  10[.]62[.]'; ip link show kube-ipvs0 2>/dev/null"
	}
	err := load.Eventually(time.Minute, func() error {
		if left := w.found(look); left != "" {
			return fmt.Errorf("there still is %s", left)
		}
		return nil
	})
	if err != nil {
		w.t.Error(err)
	}
}
