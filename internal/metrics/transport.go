package metrics

import (
	"net/http"
	"strconv"
	"time"
)

// Transport counts the requests to the API server that go through next, under the
// names that client-go gives them. Client-go's own hooks are process-wide
// variables; wrapping the transport needs none.
func (m *Metrics) Transport(next http.RoundTripper) http.RoundTripper {
	return transport{m, next}
}

type transport struct {
	m    *Metrics
	next http.RoundTripper
}

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	start := time.Now()
	resp, err := t.next.RoundTrip(r)
	code := "<error>"
	if err == nil {
		code = strconv.Itoa(resp.StatusCode)
	}
	t.m.Observe("rest_client_request_duration_seconds", time.Since(start).Seconds(), r.Method, r.URL.Host)
	t.m.Add("rest_client_requests_total", 1, code, r.Method, r.URL.Host)
	return resp, err
}

// WrappedRoundTripper lets libraries find the transport inside.
func (t transport) WrappedRoundTripper() http.RoundTripper { return t.next }
