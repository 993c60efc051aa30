package scenario

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ti-mo/conntrack"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/flow"
	"github.com/svcproxy/svcproxy/internal/scenario/subject"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// parseHealth reads PORT [path=/P] [from=HOST] -> CODE [endpoints=N].
func parseHealth(w *world.World, args []string) (healthCheck, error) {
	c := healthCheck{path: "/", endpoints: -1}
	i := slices.Index(args, "->")
	if i < 1 || i+1 >= len(args) {
		return c, world.Usagef("want PORT [path=/P] -> CODE [endpoints=N]")
	}
	var err error
	if c.to, err = w.Targets("node:" + args[0]); err != nil {
		return c, err
	}
	if c.code, err = strconv.Atoi(args[i+1]); err != nil {
		return c, world.Usagef("code %q: want a number", args[i+1])
	}
	for _, a := range slices.Concat(args[1:i], args[i+2:]) {
		k, v, _ := strings.Cut(a, "=")
		switch k {
		case "path":
			c.path = v
		case "from":
			c.from, err = w.Host(v)
		case "endpoints":
			c.endpoints, err = strconv.Atoi(v)
		default:
			err = world.Usagef("%q: want path=, from= or endpoints=", a)
		}
		if err != nil {
			return c, world.Usagef("%q: %v", a, err)
		}
	}
	return c, nil
}

// get does an HTTP request in a host's network.
func (k *kernel) get(from *world.Host, url string) (int, []byte, error) {
	h, err := k.labHost(from)
	if err != nil {
		return 0, nil, err
	}
	transport := &http.Transport{DialContext: h.DialContext, DisableKeepAlives: true}
	c := &http.Client{Transport: transport, Timeout: flow.Patient(flow.Silence)}
	resp, err := c.Get(url)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, b, err
}

// healthWait is longer than the five seconds after which a proxy tries again to listen
// on a port that another has.
const healthWait = 8 * time.Second

func (k *kernel) health(c healthCheck) error {
	from := c.from
	if from == nil {
		from = k.w.Node()
	}
	for _, t := range c.to {
		url := "http://" + t.Addr.String() + c.path
		err := flow.Eventually(healthWait, func() error {
			code, body, err := k.get(from, url)
			if err != nil {
				return err
			}
			return c.compare(code, body)
		})
		if err != nil {
			return fmt.Errorf("GET %s: %w", url, err)
		}
	}
	return nil
}

func (c *healthCheck) compare(code int, body []byte) error {
	if code != c.code {
		return fmt.Errorf("code %d, want %d: %s", code, c.code, bytes.TrimSpace(body))
	}
	if c.endpoints < 0 {
		return nil
	}
	var v struct{ LocalEndpoints *int }
	if err := json.Unmarshal(body, &v); err != nil || v.LocalEndpoints == nil {
		return fmt.Errorf("no number of localEndpoints in %q", body)
	}
	if *v.LocalEndpoints != c.endpoints {
		return fmt.Errorf("%d local endpoints, want %d", *v.LocalEndpoints, c.endpoints)
	}
	return nil
}

// conntrack checks PROTO dst=ADDR:PORT [count=N]: entries of the node by their
// original destination. Without count there must be one.
func (k *kernel) conntrack(args []string) error {
	if len(args) < 2 || !strings.HasPrefix(args[1], "dst=") {
		return world.Usagef("want PROTO dst=ADDR:PORT [count=N]")
	}
	proto, err := lab.ParseProto(args[0])
	if err != nil {
		return world.Usagef("%v", err)
	}
	to, err := k.w.Targets(strings.TrimPrefix(args[1], "dst="))
	if err != nil {
		return err
	}
	want := -1
	for _, a := range args[2:] {
		v, ok := strings.CutPrefix(a, "count=")
		if want, err = strconv.Atoi(v); !ok || err != nil {
			return world.Usagef("%q: want count=N", a)
		}
	}
	for _, t := range to {
		err := flow.Eventually(flow.Settle, func() error {
			found, err := k.entries(proto, t.Addr)
			switch {
			case err != nil:
				return flow.Final(err)
			case want < 0 && len(found) == 0:
				return errors.New("no entry")
			case want >= 0 && len(found) != want:
				return fmt.Errorf("%d entries, want %d: %s", len(found), want, strings.Join(found, "; "))
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("conntrack %s %s: %w", proto, t.Addr, err)
		}
	}
	return nil
}

func (k *kernel) entries(p lab.Proto, dst netip.AddrPort) ([]string, error) {
	node, err := k.labHost(k.w.Node())
	if err != nil {
		return nil, err
	}
	var c *conntrack.Conn
	err = node.Do(func() (err error) {
		c, err = conntrack.Dial(nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open conntrack: %w", err)
	}
	defer c.Close()
	flows, err := c.Dump(nil)
	if err != nil {
		return nil, fmt.Errorf("read conntrack: %w", err)
	}
	var out []string
	for _, f := range flows {
		o, r := f.TupleOrig, f.TupleReply
		if lab.Proto(o.Proto.Protocol) == p && o.IP.DestinationAddress.Unmap() == dst.Addr() && o.Proto.DestinationPort == dst.Port() {
			out = append(out, fmt.Sprintf("from %s to %s", netip.AddrPortFrom(o.IP.SourceAddress, o.Proto.SourcePort),
				netip.AddrPortFrom(r.IP.SourceAddress, r.Proto.SourcePort)))
		}
	}
	return out, nil
}

// run runs a program in a host's namespaces and returns what it printed.
func (k *kernel) run(h *world.Host, dir string, env []string, command []string) (stdout, stderr []byte, err error) {
	n, err := k.labHost(h)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var o, e bytes.Buffer
	c := exec.CommandContext(ctx, command[0], command[1:]...)
	c.Dir, c.Env, c.Stdout, c.Stderr, c.WaitDelay = dir, env, &o, &e, time.Second
	if err := n.Start(c); err != nil {
		return nil, nil, err
	}
	err = c.Wait()
	return o.Bytes(), e.Bytes(), err
}

// event checks REASON [on=KIND/NS/NAME]; a cluster-scoped object is KIND/NAME.
func (k *kernel) event(args []string) error {
	if len(args) < 1 || len(args) > 2 {
		return world.Usagef("want REASON [on=KIND/NS/NAME]")
	}
	var on []string
	if len(args) == 2 {
		v, ok := strings.CutPrefix(args[1], "on=")
		on = strings.Split(v, "/")
		if len(on) == 2 {
			on = []string{on[0], "", on[1]}
		}
		if !ok || len(on) != 3 {
			return world.Usagef("%q: want on=KIND/NS/NAME", args[1])
		}
	}
	return flow.Eventually(flow.Settle, func() error {
		if api, ok := k.feed.(*subject.APIFeed); ok {
			if api.Reported(args[0], on) {
				return nil
			}
		} else if k.out.Events(args[0], on) > 0 {
			return nil
		}
		return fmt.Errorf("no event %s; the proxy said last:\n%s", strings.Join(args, " "), k.out.Tail(5))
	})
}

// log waits until the proxy has printed a line that matches.
func (k *kernel) log(args []string) error {
	if len(args) != 1 {
		return world.Usagef("want one REGEX")
	}
	re, err := regexp.Compile("(?m)" + args[0])
	if err != nil {
		return world.Usagef("%v", err)
	}
	return flow.Eventually(flow.Settle, func() error {
		if !re.MatchString(k.out.String()) {
			return fmt.Errorf("nothing in the proxy's log matches %q; it said last:\n%s", args[0], k.out.Tail(5))
		}
		return nil
	})
}

// metric checks NAME{label="value",...} OP VALUE: the sum of all series of the
// name with these labels. A series that does not exist counts as 0.
func (k *kernel) metric(args []string) error {
	if len(args) < 3 {
		return world.Usagef("want NAME{...} OP VALUE")
	}
	at := len(args) - 2 // labels may stand apart
	args = []string{strings.Join(args[:at], " "), args[at], args[at+1]}
	want, err := strconv.ParseFloat(args[2], 64)
	if err != nil {
		return world.Usagef("value %q: want a number", args[2])
	}
	name, labels, err := parseSeries(args[0])
	if err != nil {
		return world.Usagef("%q: %v", args[0], err)
	}
	holds, ok := map[string]func(a, b float64) bool{
		"=": equal, "==": equal,
		"!=": func(a, b float64) bool { return a != b },
		"<":  func(a, b float64) bool { return a < b },
		"<=": func(a, b float64) bool { return a <= b },
		">":  func(a, b float64) bool { return a > b },
		">=": func(a, b float64) bool { return a >= b },
	}[args[1]]
	if !ok {
		return world.Usagef("operator %q: want = != < <= > or >=", args[1])
	}
	return flow.Eventually(flow.Settle, func() error {
		code, body, err := k.get(k.w.Node(), metricsURL)
		if err != nil {
			return err
		}
		if code != http.StatusOK {
			return fmt.Errorf("GET %s: code %d", metricsURL, code)
		}
		have := 0.0
		for line := range strings.Lines(string(body)) {
			n, l, v, ok := parseSample(line)
			if ok && n == name && subset(labels, l) {
				have += v
			}
		}
		if !holds(have, want) {
			return fmt.Errorf("metric %s is %v, want %s %v", args[0], have, args[1], want)
		}
		return nil
	})
}

const metricsURL = "http://127.0.0.1:10249/metrics"

func equal(a, b float64) bool { return a == b }

var label = regexp.MustCompile(`\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)`)

// parseSeries splits name{a="b",c="d"}.
func parseSeries(s string) (string, map[string]string, error) {
	name, rest, ok := strings.Cut(s, "{")
	if !ok {
		return name, nil, nil
	}
	rest, ok = strings.CutSuffix(rest, "}")
	if !ok {
		return "", nil, errors.New("no closing brace")
	}
	labels := map[string]string{}
	for rest != "" {
		m := label.FindStringSubmatchIndex(rest)
		if m == nil || m[0] != 0 {
			return "", nil, fmt.Errorf("labels %q: want name=\"value\"", rest)
		}
		labels[rest[m[2]:m[3]]] = rest[m[4]:m[5]]
		rest = rest[m[1]:]
	}
	return name, labels, nil
}

// parseSample reads one line of the text exposition format.
func parseSample(line string) (name string, labels map[string]string, v float64, ok bool) {
	line = strings.TrimSpace(line)
	i := strings.LastIndexByte(line, ' ')
	if i < 0 || strings.HasPrefix(line, "#") {
		return "", nil, 0, false
	}
	v, err := strconv.ParseFloat(line[i+1:], 64)
	if err != nil {
		return "", nil, 0, false
	}
	name, labels, err = parseSeries(strings.TrimSpace(line[:i]))
	return name, labels, v, err == nil
}

func subset(want, have map[string]string) bool {
	for k, v := range want {
		if have[k] != v {
			return false
		}
	}
	return true
}

// api carries out silence, resume, disconnect, stop or start: what the API server does
// to its clients. Only with the objects served over the API.
func (k *kernel) api(args []string) error {
	f, ok := k.feed.(*subject.APIFeed)
	if !ok {
		return world.Usagef("the objects come from files; guard the line with [feed:api]")
	}
	if len(args) != 1 {
		return world.Usagef("want silence, resume, disconnect, stop or start")
	}
	if err := k.build(); err != nil {
		return err
	}
	return f.Do(args[0], k.net.Host("node"))
}
