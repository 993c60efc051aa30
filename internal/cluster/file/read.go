package file

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// manifest is what is known of one file.
type manifest struct {
	stamp      stamp
	documents  []document
	unread     *finding  // why the file cannot be read now
	emptySince time.Time // when an emptied file was first seen; zero: it is not
}

// stamp tells whether a file may have changed since it was read.
type stamp struct {
	inode, device uint64
	size          int64
	modified      time.Time
	read          time.Time
}

// racy is the age below which a modification time proves nothing: a second write
// within one tick of a coarse clock leaves it as it is.
const racy = 2 * time.Second

func stampOf(i fs.FileInfo, now time.Time) stamp {
	st := stamp{size: i.Size(), modified: i.ModTime(), read: now}
	if sys, ok := i.Sys().(*syscall.Stat_t); ok {
		st.inode, st.device = sys.Ino, sys.Dev
	}
	return st
}

// covers reports whether a file stamped other now is surely the one read then.
func (st stamp) covers(other stamp) bool {
	return st.inode == other.inode && st.device == other.device && st.size == other.size &&
		st.modified.Equal(other.modified) && st.read.Sub(st.modified) > racy
}

// readDir brings files up to date with the directory. A file that cannot be read
// keeps its documents, one that is not listed any more goes.
func (s *Source) readDir(target func(dir string)) error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("list manifests: %w", err)
	}
	s.recheck = time.Time{}
	listed := make(map[string]struct{}, len(entries))
	for _, e := range entries {
		if !isManifest(e.Name()) {
			continue
		}
		path := filepath.Join(s.dir, e.Name())
		if e.Type()&fs.ModeSymlink != 0 {
			if resolved, err := filepath.EvalSymlinks(path); err == nil {
				target(filepath.Dir(resolved))
			}
		}
		if s.readFile(path) {
			listed[path] = struct{}{}
		}
	}
	for path := range s.files {
		if _, ok := listed[path]; !ok {
			delete(s.files, path)
		}
	}
	return nil
}

// isManifest reports whether a name is that of a manifest. A leading dot marks
// what belongs to an editor or to the mount of a ConfigMap.
func isManifest(name string) bool {
	return !strings.HasPrefix(name, ".") && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name))
}

// readFile brings one file up to date; false: it is not there, or not a file.
func (s *Source) readFile(path string) bool {
	known := s.files[path]
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return false
	case err == nil && !info.Mode().IsRegular():
		err = fmt.Errorf("not a regular file but %s: replace it by one", info.Mode().Type())
	case err == nil && info.Size() > MaxFileSize:
		err = fmt.Errorf("%d bytes are more than the limit of %d: split the file", info.Size(), MaxFileSize)
	case errors.Is(err, fs.ErrNotExist):
		if _, lerr := os.Lstat(path); lerr != nil {
			return false // gone since it was listed
		}
	}
	if err != nil {
		s.unreadable(path, err)
		return true
	}
	st := stampOf(info, s.o.Now())
	if known != nil && known.unread == nil && known.emptySince.IsZero() && known.stamp.covers(st) {
		return true
	}
	data, err := readAll(path)
	if err != nil {
		s.unreadable(path, err)
		return true
	}
	if known != nil && len(data) == 0 && known.gives() {
		now := s.o.Now()
		if known.emptySince.IsZero() {
			known.emptySince = now
		}
		if due := known.emptySince.Add(emptySettle); now.Before(due) {
			if s.recheck.IsZero() || due.Before(s.recheck) {
				s.recheck = due
			}
			return true
		}
	}
	s.files[path] = &manifest{stamp: st, documents: s.parse(path, data, known)}
	return true
}

// unreadable keeps what a file last gave.
func (s *Source) unreadable(path string, err error) {
	m := s.files[path]
	if m == nil {
		m = &manifest{}
		s.files[path] = m
	}
	var perr *fs.PathError
	if errors.As(err, &perr) {
		err = fmt.Errorf("%s: %w", perr.Op, perr.Err) // the path is in the problem
	}
	effect := effectUnused
	if m.gives() {
		effect = effectKept
	}
	m.unread = &finding{Problem: Problem{File: path, Reason: err.Error(), Effect: effect}}
}

// gives reports whether the file has any object in force.
func (m *manifest) gives() bool {
	return slices.ContainsFunc(m.documents, func(d document) bool { return len(d.objects)+len(d.leftover) > 0 })
}

// readAll reads a file that may grow meanwhile, up to the limit. It does not wait
// for a writer if the path has become a pipe.
func readAll(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, MaxFileSize+1))
	if err != nil {
		return nil, err
	}
	if len(data) > MaxFileSize {
		return nil, fmt.Errorf("more than the limit of %d bytes: split the file", MaxFileSize)
	}
	return data, nil
}

// parse turns a file's text into documents. known is what the file last gave.
func (s *Source) parse(path string, data []byte, known *manifest) []document {
	last := known.former()
	texts := splitYAML
	if filepath.Ext(path) == ".json" {
		texts = splitJSON
	}
	var out []document
	for _, t := range texts(data) {
		out = append(out, s.parseDocument(path, t, &last))
	}
	return out
}

// parseDocument decodes one document; what is bad in it is replaced by what it
// last gave.
func (s *Source) parseDocument(path string, t text, last *former) document {
	d := document{number: t.number, line: t.line, content: sha256.Sum256(t.data)}
	if same := last.good[d.content]; same != nil { // at whatever number
		d.objects, d.otherNodes = same.objects, same.otherNodes
		return d
	}
	items, failures := t.items()
	anonymous := len(failures) > 0
	for i := range failures {
		d.problem(path, &failures[i], last.effect(t.number))
	}
	for i := range items {
		it := &items[i]
		got := it.decode(s.o.Node)
		effect := effectField
		switch {
		case got.ignored:
			s.noteIgnored(path, &d, it.typeMeta)
		case got.other:
			d.otherNodes = true
		case got.object != nil:
			d.objects = append(d.objects, got.object)
		case len(got.failures) > 0:
			key := got.failures[0].key
			effect = effectUnused
			if old := last.byKey[key]; old != nil {
				d.objects = append(d.objects, old)
				effect = effectKept
			} else if key == (objectKey{}) {
				anonymous, effect = true, last.effect(t.number)
			}
		}
		for i := range got.failures {
			d.problem(path, &got.failures[i], effect)
		}
	}
	if anonymous {
		d.leftover = last.gave(t.number, d.objects)
	}
	return d
}

// noteIgnored logs a kind that is not read, once.
func (s *Source) noteIgnored(path string, d *document, t typeMeta) {
	if _, noted := s.ignored[t]; noted {
		return
	}
	s.ignored[t] = struct{}{}
	s.o.Log.Info("manifests of this kind are not read", "apiVersion", t.APIVersion, "kind", t.Kind, "first", place(path, d.number))
}
