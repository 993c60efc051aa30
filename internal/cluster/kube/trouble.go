package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// trouble logs what keeps the facts from coming: once when it begins or becomes
// another, not with every attempt, and once for all kinds.
type trouble struct {
	log *slog.Logger

	mu      sync.Mutex // guards current
	current map[cluster.Kind]string
}

func newTrouble(log *slog.Logger) *trouble {
	return &trouble{log: log, current: map[cluster.Kind]string{}}
}

// report notes the outcome of an attempt; nil means that the server answers. The
// orderly end of a watch is no news.
func (t *trouble) report(kind cluster.Kind, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before, had := t.current[kind]
	if err == nil {
		if had {
			delete(t.current, kind)
			if len(t.current) == 0 {
				t.log.Info("the API server answers again")
			}
		}
		return
	}
	now := class(err)
	if had && before == now {
		t.log.Debug("reading from the API server still fails", "kind", kind.String(), "error", err)
		return
	}
	level := slog.LevelWarn
	if isRoutine(err) {
		level = slog.LevelInfo
	}
	for _, other := range t.current {
		if other == now {
			level = slog.LevelDebug
		}
	}
	t.current[kind] = now
	t.log.Log(context.Background(), level, "reading from the API server fails; the last known state stays in force", "kind", kind.String(), "error", err)
}

// isRoutine reports what a healthy server does now and then.
func isRoutine(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || errors.Is(err, io.ErrUnexpectedEOF)
}

// class names the reason of an error without the parts that change from one
// attempt to the next, such as ports.
func class(err error) string {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		st := status.Status()
		kind := ""
		if st.Details != nil {
			// A missing permission concerns one kind, not the server.
			kind = st.Details.Kind
		}
		return fmt.Sprint(st.Code, st.Reason, kind)
	}
	var errno syscall.Errno
	var dns *net.DNSError
	var op *net.OpError
	switch {
	case errors.Is(err, errSilent):
		return errSilent.Error()
	case errors.As(err, &errno):
		return errno.Error()
	case errors.As(err, &dns):
		return "DNS " + dns.Err
	case errors.As(err, &op):
		return op.Op
	}
	root := err
	for next := errors.Unwrap(root); next != nil; next = errors.Unwrap(root) {
		root = next
	}
	return fmt.Sprintf("%T %v", root, root)
}
