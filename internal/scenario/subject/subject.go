// Package subject is the program under test and what it gets: how it is started and
// stopped, its configuration file, and the objects of a scenario as manifests or over
// the Kubernetes API.
package subject

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
)

// Subject is the program under test.
type Subject struct {
	// Name is what [subject:NAME] compares with.
	Name string
	// Command is the program and its arguments, in which {CONFIG}, {KUBECONFIG},
	// {NODE} and {MANIFESTS} are replaced.
	Command []string
}

// Svcproxy is the project's own program, at path, with the objects from files or
// from the API.
func Svcproxy(path string, fromAPI bool) Subject {
	s := Subject{Name: "svcproxy", Command: []string{path, "--config", "{CONFIG}"}}
	if !fromAPI {
		s.Command = append(s.Command, "--manifests", "{MANIFESTS}")
	}
	return s
}

// Parse reads a command line: words, quoted where they hold spaces, with
// leading NAME=VALUE words as environment.
func Parse(line string) (Subject, error) {
	words, err := splitWords(line)
	if err != nil {
		return Subject{}, fmt.Errorf("subject %q: %w", line, err)
	}
	env := 0
	for env < len(words) && regexp.MustCompile(`^[A-Za-z_]\w*=`).MatchString(words[env]) {
		env++
	}
	if env == len(words) {
		return Subject{}, fmt.Errorf("subject %q: no command in it", line)
	}
	s := Subject{Name: filepath.Base(words[env]), Command: words}
	if env > 0 {
		s.Command = append([]string{"env"}, words...)
	}
	return s, nil
}

func splitWords(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	quote, inWord := rune(0), false
	for _, c := range line {
		switch {
		case quote != 0 && c == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(c)
		case c == '\'' || c == '"':
			quote, inWord = c, true
		case c == ' ' || c == '\t' || c == '\n':
			if inWord {
				words = append(words, word.String())
				word.Reset()
				inWord = false
			}
		default:
			word.WriteRune(c)
			inWord = true
		}
	}
	if quote != 0 {
		return nil, errors.New("a quote is not closed")
	}
	if inWord {
		words = append(words, word.String())
	}
	return words, nil
}

// Process is one run of the subject.
type Process struct {
	cmd    *exec.Cmd
	Exited chan struct{} // closed at its end
	Err    error         // how it ended, once Exited is closed
}

// Start starts the subject on the node; its output goes to out.
func Start(node *lab.Host, command []string, out *Output) (*Process, error) {
	p := &Process{cmd: exec.Command(command[0], command[1:]...), Exited: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.WaitDelay = time.Second // children may hold the pipes
	if err := node.Start(p.cmd); err != nil {
		return nil, fmt.Errorf("start the proxy: %w", err)
	}
	go func() {
		p.Err = p.cmd.Wait()
		close(p.Exited)
	}()
	return p, nil
}

// Terminate asks the process to end and does not wait for it.
func (p *Process) Terminate() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %s to the proxy: %w", syscall.SIGTERM, err)
	}
	return nil
}

// drain is more than a proxy that carries connections itself serves them for after it
// was told to end: svcproxy's userspace mode, 25 s.
const drain = 40 * time.Second

// End stops the process and waits for its end.
func (p *Process) End(kill bool) error {
	signal := syscall.SIGTERM
	if kill {
		signal = syscall.SIGKILL
	}
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %s to the proxy: %w", signal, err)
	}
	select {
	case <-p.Exited:
		return nil
	case <-time.After(drain):
		p.cmd.Process.Kill()
		<-p.Exited
		return fmt.Errorf("the proxy did not end within %s of %s", drain, signal)
	}
}

// Output collects what all runs of the proxy print.
type Output struct {
	mu   sync.Mutex // guards all below
	text bytes.Buffer
}

// Write adds output.
func (o *Output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(b)
}

// String returns all of it.
func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// Tail returns the last n lines.
func (o *Output) Tail(n int) string {
	lines := strings.Split(strings.TrimRight(o.String(), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// Events counts the lines in which the proxy reports an event about an object,
// as structured logs of either form carry it; on is its kind, namespace and name, nil:
// any.
func (o *Output) Events(reason string, on []string) int {
	n := 0
	for line := range strings.Lines(o.String()) {
		if field(line, "reason") != reason {
			continue
		}
		k := []string{field(line, "kind"), field(line, "namespace"), field(line, "name")}
		if on == nil || slices.Equal(on, k) {
			n++
		}
	}
	return n
}

// field returns the value of a key in a line of log, key=value or "key":"value".
func field(line, name string) string {
	m := regexp.MustCompile(`(?:^|[\s,{])"?` + name + `"?[=:]\s*(?:"([^"]*)"|([^\s,}]*))`).FindStringSubmatch(line)
	if m == nil {
		return ""
	}
	return m[1] + m[2]
}
