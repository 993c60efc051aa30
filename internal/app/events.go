package app

import (
	"context"
	"log/slog"

	"github.com/svcproxy/svcproxy/internal/cluster/kube"
	"github.com/svcproxy/svcproxy/internal/plan"
)

// events tells remarks on Kubernetes objects to people: one log line each, and an
// event in the API where there is one. It never blocks.
type events struct {
	log      *slog.Logger
	recorder *kube.Recorder // nil: no API
	node     string
}

// notes tells what the planner and the loop remarked. What is not worth a warning
// is said when debugging only, and by "svcproxy plan --why".
func (e *events) notes(notes []plan.Note) {
	for _, n := range notes {
		if !n.Warning {
			e.write(slog.LevelDebug, "Normal", n)
			continue
		}
		e.write(slog.LevelWarn, "Warning", n)
		e.record(n, "")
	}
}

// onNode tells about this node's proxy, as kube-proxy does at its start.
func (e *events) onNode(reason plan.Reason, warning bool, message string) {
	n := plan.Note{Kind: "Node", Name: e.node, Reason: reason, Message: message, Warning: warning}
	if warning {
		e.write(slog.LevelWarn, "Warning", n)
	} else {
		e.write(slog.LevelInfo, "Normal", n)
	}
	e.record(n, "StartKubeProxy")
}

func (e *events) write(level slog.Level, kind string, n plan.Note) {
	attrs := []slog.Attr{slog.String("reason", string(n.Reason)), slog.String("kind", n.Kind)}
	if n.Namespace != "" {
		attrs = append(attrs, slog.String("namespace", n.Namespace))
	}
	attrs = append(attrs, slog.String("name", n.Name), slog.String("type", kind), slog.String("message", n.Message))
	e.log.LogAttrs(context.Background(), level, "event", attrs...)
}

func (e *events) record(n plan.Note, action string) {
	if e.recorder == nil {
		return
	}
	e.recorder.Record(kube.Event{
		Kind: n.Kind, Namespace: n.Namespace, Name: n.Name, UID: n.UID,
		Warning: n.Warning, Reason: string(n.Reason), Action: action, Message: n.Message,
	})
}
