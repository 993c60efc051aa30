package conntrack

import (
	"errors"
	"io/fs"
	"slices"
	"testing"
	"time"

	"github.com/svcproxy/svcproxy/internal/sys/host"
)

const (
	maxKey         = "net.netfilter.nf_conntrack_max"
	hashKey        = "nf_conntrack/hashsize"
	establishedKey = "net.netfilter.nf_conntrack_tcp_timeout_established"
	closeWaitKey   = "net.netfilter.nf_conntrack_tcp_timeout_close_wait"
	udpKey         = "net.netfilter.nf_conntrack_udp_timeout"
	streamKey      = "net.netfilter.nf_conntrack_udp_timeout_stream"
	liberalKey     = "net.netfilter.nf_conntrack_tcp_be_liberal"
)

// kernelValues are those of a machine nobody has touched, with changes.
func kernelValues(changes ...string) map[string]string {
	m := map[string]string{
		maxKey: "65536", hashKey: "16384", establishedKey: "432000", closeWaitKey: "60",
		udpKey: "30", streamKey: "120", liberalKey: "0",
	}
	for i := 0; i < len(changes); i += 2 {
		m[changes[i]] = changes[i+1]
	}
	return m
}

func TestSetup(t *testing.T) {
	for name, c := range map[string]struct {
		sizing Sizing
		values map[string]string
		cpus   int
		writes []string
	}{
		"do nothing if it is empty":                       {},
		"max follows the CPUs":                            {sizing: Sizing{MaxPerCore: 32768}, cpus: 4, writes: []string{maxKey + "=131072", hashKey + "=32768"}},
		"max has a floor":                                 {sizing: Sizing{MaxPerCore: 32768, Min: 131072}, cpus: 1, writes: []string{maxKey + "=131072", hashKey + "=32768"}},
		"max ends at a million, even below the floor":     {sizing: Sizing{MaxPerCore: 32768, Min: 2000000}, cpus: 40, writes: []string{maxKey + "=1048576", hashKey + "=262144"}},
		"max is not written if it is right":               {sizing: Sizing{MaxPerCore: 16384}, cpus: 4},
		"max is not written if it is higher":              {sizing: Sizing{MaxPerCore: 100}, cpus: 4},
		"max is not written without a value per core":     {sizing: Sizing{Min: 1000000}, cpus: 4},
		"only the hash size is too low":                   {sizing: Sizing{MaxPerCore: 16384}, cpus: 4, values: kernelValues(hashKey, "1024"), writes: []string{hashKey + "=16384"}},
		"only max is too low":                             {sizing: Sizing{MaxPerCore: 32768}, cpus: 4, values: kernelValues(hashKey, "65536"), writes: []string{maxKey + "=131072"}},
		"established timeout":                             {sizing: Sizing{TCPEstablished: 24 * time.Hour}, writes: []string{establishedKey + "=86400"}},
		"close-wait timeout":                              {sizing: Sizing{TCPCloseWait: time.Hour}, writes: []string{closeWaitKey + "=3600"}},
		"UDP timeouts":                                    {sizing: Sizing{UDP: time.Minute, UDPStream: 5 * time.Minute}, writes: []string{udpKey + "=60", streamKey + "=300"}},
		"timeouts that are right are not written":         {sizing: Sizing{UDP: 30 * time.Second, TCPCloseWait: time.Minute}},
		"be liberal":                                      {sizing: Sizing{BeLiberal: true}, writes: []string{liberalKey + "=1"}},
		"be liberal is not written if it is right":        {sizing: Sizing{BeLiberal: true}, values: kernelValues(liberalKey, "1")},
		"be liberal is left alone if it is not asked for": {values: kernelValues(liberalKey, "1")},
	} {
		t.Run(name, func(t *testing.T) {
			h := &host.Fake{Values: c.values, CPUs: c.cpus}
			if h.Values == nil {
				h.Values = kernelValues()
			}
			if w := Setup(h, c.sizing); len(w) > 0 {
				t.Errorf("warnings: %v", w)
			}
			if !slices.Equal(h.Writes(), c.writes) {
				t.Errorf("wrote %q, want %q", h.Writes(), c.writes)
			}
		})
	}
}

// What is refused is named and does not keep the rest from being set.
func TestSetupRefused(t *testing.T) {
	h := &host.Fake{Values: kernelValues(), CPUs: 4, ReadOnly: map[string]bool{maxKey: true, establishedKey: true}}
	delete(h.Values, hashKey)
	w := Setup(h, Sizing{MaxPerCore: 32768, TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour})
	if len(w) != 3 {
		t.Fatalf("have %d warnings, want 3: %v", len(w), w)
	}
	if w[0].Name != maxKey || w[0].Want != "131072" || w[0].Have != "65536" || !errors.Is(w[0], fs.ErrPermission) {
		t.Errorf("have %+v", w[0])
	}
	if w[1].Name != "module parameter nf_conntrack/hashsize" || !errors.Is(w[1], fs.ErrNotExist) {
		t.Errorf("have %+v", w[1])
	}
	if w[2].Name != establishedKey {
		t.Errorf("have %+v", w[2])
	}
	if want := []string{closeWaitKey + "=3600"}; !slices.Equal(h.Writes(), want) {
		t.Errorf("wrote %q, want %q", h.Writes(), want)
	}
}

// Where another process has prepared the node, one without privileges is content.
func TestSetupTwice(t *testing.T) {
	s := Sizing{MaxPerCore: 32768, TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour, UDP: time.Minute, UDPStream: time.Minute, BeLiberal: true}
	h := &host.Fake{Values: kernelValues(), CPUs: 4}
	if w := Setup(h, s); len(w) > 0 {
		t.Fatal(w)
	}
	n := len(h.Writes())
	h.ReadOnly = map[string]bool{maxKey: true, hashKey: true, establishedKey: true, closeWaitKey: true, udpKey: true, streamKey: true, liberalKey: true}
	if w := Setup(h, s); len(w) > 0 || len(h.Writes()) != n {
		t.Errorf("warnings %v, writes %q", w, h.Writes())
	}
}
