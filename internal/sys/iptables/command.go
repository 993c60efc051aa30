package iptables

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// lockFile is the lock that all users of the legacy store take.
	lockFile = "/run/xtables.lock"
	// lockPatience is how long a Restore waits for it, in seconds.
	lockPatience = 5
	// mostOutput bounds what is kept of a program's messages.
	mostOutput = 8 << 10
	// exitBusy is iptables' exit status for a lock or a resource it did not get. The
	// nft variant also ends so when the kernel refuses a rule, but then names a line.
	exitBusy = 4
)

// Command is Tables by way of the iptables programs.
type Command struct {
	family        Family
	store         Store
	save, restore string // paths
	lockWait      LockWait

	mu      sync.Mutex // guards what follows; held while a legacy Restore runs
	writers []int      // process ids of the last Restores: their changes are our own
	sizes   map[Table]tableSize
	unsaid  []string // changes by others that the next look tells of
	writing int
}

// NewCommand returns the tables that the programs at the paths save and restore
// reach. It touches nothing. wait may be nil.
func NewCommand(f Family, s Store, save, restore string, wait LockWait) *Command {
	if wait == nil {
		wait = func(time.Duration) {}
	}
	return &Command{family: f, store: s, save: save, restore: restore, lockWait: wait, sizes: map[Table]tableSize{}}
}

func (c *Command) Family() Family { return c.family }
func (c *Command) Store() Store   { return c.store }

// Dropped returns how many packets the DROP rules of a chain of the filter table have
// met since the chain was last written.
func (c *Command) Dropped(ctx context.Context, chain string) (uint64, error) {
	const most = 1 << 20
	program := strings.TrimSuffix(c.restore, "-restore")
	out, err := runProgram(ctx, most, program, "-w", strconv.Itoa(lockPatience), "-t", string(Filter), "-nvxL", chain)
	if err != nil {
		return 0, fmt.Errorf("count the packets of chain %s: %w", chain, err)
	}
	var sum uint64
	for line := range bytes.Lines(out) { // packets, bytes, target, ...
		f := bytes.Fields(line)
		if len(f) < 3 || string(f[2]) != "DROP" {
			continue
		}
		n, err := strconv.ParseUint(string(f[0]), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("count the packets of chain %s: %s prints %q: %w", chain, program, line, err)
		}
		sum += n
	}
	return sum, nil
}

// String names the program that writes, for logs.
func (c *Command) String() string { return c.restore }

func (c *Command) Save(ctx context.Context, t Table, line func([]byte) error) error {
	if c.store == Legacy && !legacyHas("/proc", c.family, t) {
		return nil
	}
	if c.store == Legacy {
		c.noticeSize(t)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.save, "-t", string(t))
	stderr := &head{}
	cmd.Stderr = stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("read table %s with %s: %w", t, c.save, err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("read table %s with %s: %w", t, c.save, err)
	}
	if err := eachLine(out, line); err != nil {
		cancel()
		_ = cmd.Wait() // it was killed; the reason is err
		return fmt.Errorf("read table %s with %s: %w", t, c.save, err)
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("read table %s with %s: %w: %s", t, c.save, err, stderr)
	}
	return nil
}

func (c *Command) Restore(ctx context.Context, input func(*bufio.Writer) error) error {
	if c.store == Legacy {
		c.measureLock(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.noticeSizes()
		defer c.rememberSizes()
	}
	if err := c.run(ctx, input); err != nil {
		return fmt.Errorf("%s: %w", c.restore, err)
	}
	return nil
}

func (c *Command) run(ctx context.Context, input func(*bufio.Writer) error) error {
	cmd := exec.CommandContext(ctx, c.restore, "-w", strconv.Itoa(lockPatience), "--noflush")
	out := &head{}
	cmd.Stdout, cmd.Stderr = out, out
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	c.began(cmd.Process.Pid)
	defer c.ended()
	w := bufio.NewWriterSize(in, 64<<10)
	writeErr := input(w)
	if writeErr == nil {
		writeErr = w.Flush()
	}
	if writeErr != nil && !errors.Is(writeErr, unix.EPIPE) {
		_ = cmd.Process.Kill() // before it sees the end of its input as complete
	}
	if err := in.Close(); writeErr == nil {
		writeErr = err
	}
	err = cmd.Wait()
	if err != nil && ctx.Err() == nil && (writeErr == nil || errors.Is(writeErr, unix.EPIPE)) {
		return classify(err, out.String())
	}
	return errors.Join(err, writeErr, ctx.Err())
}

// began and ended bracket a run of the program that writes.
func (c *Command) began(pid int) {
	if c.store == Legacy {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	const remembered = 64
	if len(c.writers) >= remembered {
		c.writers = append(c.writers[:0], c.writers[1:]...)
	}
	c.writers = append(c.writers, pid)
	c.writing++
}

func (c *Command) ended() {
	if c.store == Legacy {
		return
	}
	c.mu.Lock()
	c.writing--
	c.mu.Unlock()
}

var (
	lineFailed = regexp.MustCompile(`(?m)(?:^|: )line ([0-9]+)(?:: | failed)`)
	errorAt    = regexp.MustCompile(`(?m)^Error occurred at line: ([0-9]+)`)
)

// classify turns the end of iptables-restore and what it said into an error.
func classify(err error, output string) error {
	e := &RestoreError{Output: output, Err: err}
	for _, re := range []*regexp.Regexp{errorAt, lineFailed} {
		if m := re.FindStringSubmatch(output); m != nil {
			e.Line, _ = strconv.Atoi(m[1])
			break
		}
	}
	var exit *exec.ExitError
	e.Busy = e.Line == 0 && errors.As(err, &exit) && exit.ExitCode() == exitBusy ||
		strings.Contains(output, "Resource temporarily unavailable") || strings.Contains(output, "xtables lock") ||
		strings.Contains(output, "emory") // "Memory allocation problem", "Cannot allocate memory"
	return e
}

// measureLock reports how long the lock of the legacy store is taken by others.
// iptables-restore takes it itself afterwards, so it is given back at once.
func (c *Command) measureLock(ctx context.Context) {
	f, err := os.OpenFile(lockFile, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return // the program will say what is wrong
	}
	defer f.Close()
	start := time.Now()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		waited := time.Since(start)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) || waited > lockPatience*time.Second {
			c.lockWait(waited)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// head keeps the first bytes of what is written to it.
type head struct{ buf bytes.Buffer }

func (t *head) Write(p []byte) (int, error) {
	if room := mostOutput - t.buf.Len(); room > 0 {
		t.buf.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

func (t *head) String() string { return strings.TrimSpace(t.buf.String()) }
