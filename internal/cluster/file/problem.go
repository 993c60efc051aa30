package file

import (
	"crypto/sha256"
	"fmt"
	"strings"
)

// Problem is one thing that is wrong in a directory of manifests.
type Problem struct {
	File     string // path; the directory's own if it cannot be listed
	Document int    // within the file, counted from 1; 0: the whole file
	Line     int    // on which the document begins
	Object   string // kind and name, "" if it has none
	Field    string // path within the object, "" for the document as a whole
	Reason   string
	Effect   string // what happens now
}

// What happens because of a problem.
const (
	effectKept      = "what it last gave stays in force"
	effectUnused    = "it is not used"
	effectField     = "the field is ignored"
	effectDirectory = "what it last gave stays in force; it is tried again"
)

// String returns the problem in one line.
func (p Problem) String() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Document > 0 {
		fmt.Fprintf(&b, ": document %d (line %d)", p.Document, p.Line)
	}
	for _, part := range [...]string{p.Object, p.Field, p.Reason} {
		if part != "" {
			b.WriteString(": " + part)
		}
	}
	return b.String() + "; " + p.Effect
}

// finding is a problem and the content that has it.
type finding struct {
	Problem
	content [sha256.Size]byte
}

// findingKey is what makes a problem the same one at another time: its place in
// the file may move.
type findingKey struct {
	file, object, field, reason string
	content                     [sha256.Size]byte
}

func (f *finding) key() findingKey {
	return findingKey{f.File, f.Object, f.Field, f.Reason, f.content}
}

// report logs each problem that the last report did not have. With keep, the
// earlier problems are still there.
func (s *Source) report(found []finding, keep bool) {
	now := make(map[findingKey]struct{}, len(found))
	problems := make([]Problem, 0, len(found))
	for i := range found {
		p, k := &found[i].Problem, found[i].key()
		problems = append(problems, *p)
		now[k] = struct{}{}
		if _, known := s.reported[k]; !known {
			s.o.Log.Warn("manifest problem", "file", p.File, "document", p.Document, "line", p.Line,
				"object", p.Object, "field", p.Field, "reason", p.Reason, "effect", p.Effect)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if keep {
		for k := range s.reported {
			now[k] = struct{}{}
		}
		for _, p := range s.problems {
			if p.Effect != effectDirectory {
				problems = append(problems, p)
			}
		}
	}
	s.reported, s.problems = now, problems
}

// place names a document in a message about another one.
func place(file string, document int) string { return fmt.Sprintf("%s, document %d", file, document) }
