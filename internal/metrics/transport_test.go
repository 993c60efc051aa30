package metrics

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
)

func TestTransport(t *testing.T) {
	srv := httptest.NewServer(http.NotFoundHandler())
	at, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	m := New("iptables", Build{}, quiet())
	client := &http.Client{Transport: m.Transport(&http.Transport{DisableKeepAlives: true})}
	for range 2 {
		resp, err := client.Get(srv.URL)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	srv.Close()
	if resp, err := client.Get(srv.URL); err == nil {
		resp.Body.Close()
		t.Fatal("no error from a server that is gone")
	}
	text := scrape(t, m, "text/plain")
	for sample, want := range map[string]string{
		`rest_client_requests_total{code="404",host="` + at.Host + `",method="GET"}`:     "2",
		`rest_client_requests_total{code="<error>",host="` + at.Host + `",method="GET"}`: "1",
		`rest_client_request_duration_seconds_count{host="` + at.Host + `",verb="GET"}`:  "3",
	} {
		if have := value(text, sample); have != want {
			t.Errorf("%s is %q, want %q", sample, have, want)
		}
	}
}
