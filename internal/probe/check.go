package probe

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"

	"github.com/svcproxy/svcproxy/internal/plan"
)

// mostRead is how much of an answer is read, in bytes.
const mostRead = 64 << 10

// checker carries out probes.
type checker struct {
	dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// check returns nil if the target passes, else why it does not.
func (c checker) check(ctx context.Context, k key) error {
	ctx, cancel := context.WithTimeout(ctx, k.check.Value().Timeout)
	defer cancel()
	err := c.connect(ctx, k)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("no answer within %s", k.check.Value().Timeout)
	}
	return err
}

func (c checker) connect(ctx context.Context, k key) error {
	conn, err := c.dial(ctx, "tcp", k.at.String())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // whatever it says, the answer is there
	check := k.check.Value()
	if check.Method == plan.CheckTCP {
		return nil
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	code, err := get(conn, k)
	if err != nil {
		return fmt.Errorf("GET %s: %w", check.Path, err)
	}
	switch want := int(check.Code); {
	case want == 0 && (code < 200 || code > 399):
		return fmt.Errorf("GET %s gives status %d, want one from 200 to 399", check.Path, code)
	case want != 0 && code != want:
		return fmt.Errorf("GET %s gives status %d, want %d", check.Path, code, want)
	}
	return nil
}

// get asks for the path and returns the status. Redirections are an answer, not
// followed; of a body nothing is read. A client of the standard library would keep
// two goroutines for each connection and log what odd servers say.
func get(conn net.Conn, k key) (int, error) {
	u, err := url.ParseRequestURI(k.check.Value().Path)
	if err != nil {
		return 0, err
	}
	u.Scheme, u.Host = "http", k.at.String()
	request := http.Request{
		Method: http.MethodGet, URL: u, Host: u.Host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"User-Agent": {"svcproxy-health-check"}}, Close: true,
	}
	if err := request.Write(conn); err != nil {
		return 0, err
	}
	r := bufio.NewReader(io.LimitReader(conn, mostRead))
	for {
		response, err := http.ReadResponse(r, &request) //nolint:bodyclose // that would read it to its end; the connection is closed
		if err != nil {
			return 0, err
		}
		if response.StatusCode >= 200 { // the others come before the answer
			return response.StatusCode, nil
		}
	}
}
