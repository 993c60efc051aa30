package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// ListenFunc opens a listening TCP socket; network is tcp, tcp4 or tcp6.
type ListenFunc func(network, addr string) (net.Listener, error)

func listen(network, addr string) (net.Listener, error) { return net.Listen(network, addr) }

// retryEvery is the pause between two attempts to listen.
const retryEvery = 5 * time.Second

// Server serves one address.
type Server struct {
	Name    string // in messages: "health", "metrics"
	Addr    string // IP:port; empty: nothing is served
	Handler http.Handler
	// HardFail makes an address that cannot be listened on an error of Run;
	// otherwise it is tried again every 5 s.
	HardFail bool
	// Failed is told when listening fails for the first time; may be nil.
	Failed func(error)
	Log    *slog.Logger
	Listen ListenFunc // nil: net.Listen
}

// Run serves until ctx ends and returns nil then.
func (s Server) Run(ctx context.Context) error {
	if s.Addr == "" {
		return nil
	}
	if s.Listen == nil {
		s.Listen = listen
	}
	if s.Log == nil {
		s.Log = slog.New(slog.DiscardHandler)
	}
	said := ""
	for ctx.Err() == nil {
		err := s.serve(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if s.HardFail {
			return err
		}
		again := said == err.Error()
		first := said == ""
		said = err.Error()
		switch {
		case first && s.Failed != nil: // who is told says it
			s.Failed(fmt.Errorf("%w; it is tried again every %s", err, retryEvery))
		case !again:
			s.Log.Error("an address is not served for now", "server", s.Name, "address", s.Addr, "error", err, "retry", retryEvery)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retryEvery):
		}
	}
	return nil
}

// serve returns when ctx ends or serving fails.
func (s Server) serve(ctx context.Context) error {
	l, err := s.Listen("tcp", s.Addr)
	if err != nil {
		return fmt.Errorf("listen on %s for %s: %w", s.Addr, s.Name, err)
	}
	s.Log.Info("serving", "server", s.Name, "address", l.Addr().String())
	srv := newServer(s.Handler, s.Log)
	stop := context.AfterFunc(ctx, func() { shutDown(srv) })
	defer stop()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s on %s: %w", s.Name, s.Addr, err)
	}
	return nil
}

// newServer bounds what a client can hold on to. There is no limit on writing: a
// profile takes as long as its user asks for.
func newServer(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// shutDown lets running answers end, for a second.
func shutDown(srv *http.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if srv.Shutdown(ctx) != nil {
		_ = srv.Close()
	}
}
