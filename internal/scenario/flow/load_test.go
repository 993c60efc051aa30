package flow

import (
	"context"
	"testing"
	"time"
)

func TestLoadCountsWhatIsNotExcused(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	_, stop := context.WithCancel(t.Context())
	l := &Load{name: "l", stop: stop, ended: []request{
		{Span{at(0), at(1)}, ""},
		{Span{at(1), at(3)}, "begun before"},
		{Span{at(4), at(5)}, "within"},
		{Span{at(6), at(9)}, "ended after"},
		{Span{at(8), at(9)}, "outside"},
	}}
	excused := Span{at(2), at(7)}
	if counted, failed := l.Count(excused); counted != 2 || len(failed) != 1 || failed[0] != "outside" {
		t.Errorf("have %d and %q", counted, failed)
	}
	if err := l.Expect(1, excused); err != nil {
		t.Error(err)
	}
	if err := l.Expect(0, excused); err == nil {
		t.Error("an error that counts is none")
	}
	if err := l.Expect(0, Span{at(0), at(9)}); err == nil {
		t.Error("nothing counts, and that is none")
	}
}
