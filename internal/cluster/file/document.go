package file

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/svcproxy/svcproxy/internal/cluster"
)

// document is one document of a file, as it is in force.
type document struct {
	number, line int
	content      [sha256.Size]byte
	objects      []*object // in order; a bad one is there as it last was
	// leftover is what a document gave before it became unreadable. It yields to
	// objects of other documents of the file, as the numbers may have shifted.
	leftover   []*object
	otherNodes bool // has Nodes of other names than the own
	findings   []finding
}

// objectKey names an object within a directory.
type objectKey struct {
	kind string
	name cluster.Name
}

func (k objectKey) String() string {
	if k.name.Namespace == "" {
		return k.kind + " " + k.name.Name
	}
	return k.kind + " " + k.name.String()
}

// compare orders by kind, endpoints before Services, then by name.
func (k objectKey) compare(o objectKey) int {
	return cmp.Or(strings.Compare(k.kind, o.kind), strings.Compare(k.name.Namespace, o.name.Namespace), strings.Compare(k.name.Name, o.name.Name))
}

// object is one object in the form in which it is delivered: the field of its
// kind is set.
type object struct {
	key     objectKey
	service *cluster.Service
	slices  []*cluster.Slice // also of a classic Endpoints
	node    *cluster.Node
	cidrs   []netip.Prefix
	handed  bool // the State owns it
}

// failure is what is wrong with one object or document.
type failure struct {
	key           objectKey // zero: the object cannot be told
	field, reason string
}

func (d *document) problem(path string, f *failure, effect string) {
	name := ""
	if f.key != (objectKey{}) {
		name = f.key.String()
	}
	d.findings = append(d.findings, finding{
		Problem: Problem{File: path, Document: d.number, Line: d.line, Object: name, Field: f.field, Reason: f.reason, Effect: effect},
		content: d.content,
	})
}

// former is what a file gave before, for looking up.
type former struct {
	good     map[[sha256.Size]byte]*document // documents without findings
	byNumber map[int]*document
	byKey    map[objectKey]*object
}

// former indexes a manifest, which may be nil.
func (m *manifest) former() former {
	f := former{good: map[[sha256.Size]byte]*document{}, byNumber: map[int]*document{}, byKey: map[objectKey]*object{}}
	if m == nil {
		return f
	}
	for i := range m.documents {
		d := &m.documents[i]
		f.byNumber[d.number] = d
		if len(d.findings) == 0 {
			f.good[d.content] = d
		}
	}
	for _, of := range [...]func(*document) []*object{
		func(d *document) []*object { return d.objects },
		func(d *document) []*object { return d.leftover }, // yields
	} {
		for i := range m.documents {
			for _, o := range of(&m.documents[i]) {
				if f.byKey[o.key] == nil {
					f.byKey[o.key] = o
				}
			}
		}
	}
	return f
}

// gave returns the objects that the document of that number last gave and that are
// not among but.
func (f *former) gave(number int, but []*object) (out []*object) {
	d := f.byNumber[number]
	if d == nil {
		return nil
	}
	has := make(map[objectKey]struct{}, len(but))
	for _, o := range but {
		has[o.key] = struct{}{}
	}
	for _, o := range slices.Concat(d.objects, d.leftover) {
		if _, ok := has[o.key]; !ok {
			has[o.key] = struct{}{}
			out = append(out, o)
		}
	}
	return out
}

// effect is what becomes of a document that cannot be read.
func (f *former) effect(number int) string {
	if d := f.byNumber[number]; d != nil && len(d.objects)+len(d.leftover) > 0 {
		return effectKept
	}
	return effectUnused
}

// text is the text of one document.
type text struct {
	number, line int
	data         []byte
	err          error // of finding the document's end
	json         bool
}

// splitYAML splits a file at its document markers. Documents without any text do
// not count.
func splitYAML(data []byte) []text {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	var out []text
	start, line, first := 0, 1, 1
	flush := func(end int) {
		if !isBlank(data[start:end]) {
			out = append(out, text{number: len(out) + 1, line: first, data: data[start:end]})
		}
	}
	for at := 0; at < len(data); line++ {
		next := len(data)
		if i := bytes.IndexByte(data[at:], '\n'); i >= 0 {
			next = at + i + 1
		}
		if marker := data[at:next]; isMarker(marker, "---") || isMarker(marker, "...") {
			flush(at)
			start, first = at+3, line
			if len(bytes.TrimSpace(data[start:next])) == 0 {
				start, first = next, line+1
			}
		}
		at = next
	}
	flush(len(data))
	return out
}

// isMarker reports whether a line begins with a document marker.
func isMarker(line []byte, marker string) bool {
	rest, ok := bytes.CutPrefix(line, []byte(marker))
	return ok && (len(rest) == 0 || strings.ContainsRune(" \t\r\n", rune(rest[0])))
}

// isBlank reports whether nothing but white space and directives is there.
func isBlank(data []byte) bool {
	for line := range bytes.Lines(data) {
		if line = bytes.TrimSpace(line); len(line) > 0 && line[0] != '%' {
			return false
		}
	}
	return true
}

// splitJSON splits a stream of JSON values. Where it breaks off, the rest is one
// document.
func splitJSON(data []byte) []text {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	var out []text
	d := json.NewDecoder(bytes.NewReader(data))
	line, counted := 1, 0
	for {
		var raw json.RawMessage
		err := d.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return out
		}
		start := int(d.InputOffset()) - len(raw)
		if err != nil {
			start = counted
			start += len(data[start:]) - len(bytes.TrimLeft(data[start:], " \t\r\n"))
			raw = data[start:]
		}
		line += bytes.Count(data[counted:start], []byte("\n"))
		out = append(out, text{number: len(out) + 1, line: line, data: raw, err: err, json: true})
		if err != nil {
			return out
		}
		line += bytes.Count(data[start:start+len(raw)], []byte("\n"))
		counted = start + len(raw)
	}
}

// typeMeta says what an object is.
type typeMeta struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
}

// item is one object of a document, not decoded yet.
type item struct {
	typeMeta
	prefix string // path of the object within the document, with a dot; "" for the document
	data   []byte // JSON
}

// items returns the objects of a document, lists unfolded. A failure is about the
// document or one item of a list.
func (t *text) items() ([]item, []failure) {
	if t.err != nil {
		return nil, []failure{{reason: "not JSON: " + t.err.Error()}}
	}
	data := t.data
	if !t.json {
		var err error
		if data, err = yaml.YAMLToJSONStrict(t.data); err != nil {
			return nil, []failure{{reason: "not YAML: " + t.explain(err)}}
		}
	}
	if bytes.Equal(bytes.TrimSpace(data), []byte("null")) {
		return nil, nil
	}
	return unfold(item{data: data}, typeMeta{}, 0)
}

// explain parses a broken YAML document once more where it stands in the file, for
// the line number in the message.
func (t *text) explain(err error) string {
	if _, moved := yaml.YAMLToJSONStrict(append(bytes.Repeat([]byte("\n"), t.line-1), t.data...)); moved != nil {
		err = moved
	}
	s := err.Error()
	for _, prefix := range [...]string{"error converting YAML to JSON: ", "yaml: "} {
		s = strings.TrimPrefix(s, prefix)
	}
	return oneLine(s)
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// maxListDepth bounds lists of lists.
const maxListDepth = 4

// unfold returns the objects of a list, or the object itself. Items of a typed
// list need not repeat its kind.
func unfold(it item, inherited typeMeta, depth int) ([]item, []failure) {
	fail := func(field, reason string) ([]item, []failure) {
		return nil, []failure{{field: strings.TrimSuffix(it.prefix+field, "."), reason: reason}}
	}
	if !bytes.HasPrefix(bytes.TrimSpace(it.data), []byte("{")) {
		return fail("", "not an object: a document is a mapping with apiVersion and kind")
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(it.data, &it.typeMeta); err != nil {
		return nil, []failure{decodeFailure(objectKey{}, it.prefix, err)}
	}
	if it.typeMeta == (typeMeta{}) {
		it.typeMeta = inherited
	}
	kind, isList := strings.CutSuffix(it.Kind, "List")
	switch {
	case it.Kind == "":
		return fail("kind", "missing: say what the object is")
	case it.APIVersion == "":
		return fail("apiVersion", "missing: say in which version the "+it.Kind+" is written")
	case !isList:
		return []item{it}, nil
	case depth == maxListDepth:
		return fail("items", fmt.Sprintf("lists are nested more than %d deep", maxListDepth))
	}
	inherited = typeMeta{}
	if kind != "" {
		inherited = typeMeta{APIVersion: it.APIVersion, Kind: kind}
	}
	var list struct {
		Items []json.RawMessage `json:"items"`
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(it.data, &list); err != nil {
		return nil, []failure{decodeFailure(objectKey{}, it.prefix, err)}
	}
	var out []item
	var failures []failure
	for i, raw := range list.Items {
		below, bad := unfold(item{prefix: fmt.Sprintf("%sitems[%d].", it.prefix, i), data: raw}, inherited, depth+1)
		out = append(out, below...)
		for _, f := range bad {
			failures = addFailure(failures, f)
		}
	}
	return out, failures
}
