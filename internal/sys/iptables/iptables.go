// Package iptables is the narrow seam to the kernel's packet filter as the
// iptables programs present it: tables are read with iptables-save, written with
// iptables-restore --noflush, and watched for changes that others make. Both
// stores are served, legacy (x_tables) and nft (nf_tables). [Find] tells which one
// a node uses; [Fake] is a working stand-in that prints itself the same way.
//
// Nothing here knows what a Service is.
package iptables

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// Family is an IP family by its number.
type Family uint8

const (
	IPv4 Family = 4
	IPv6 Family = 6
)

func (f Family) String() string { return fmt.Sprintf("IPv%d", uint8(f)) }

// Store is where the kernel keeps the rules; the two do not see each other.
type Store uint8

const (
	Legacy Store = iota // x_tables: a table is replaced as a whole
	NFT                 // nf_tables, through the nft variant of iptables
)

func (s Store) String() string { return [...]string{"legacy", "nft"}[s] }

// Table is the name of a table.
type Table string

const (
	NAT    Table = "nat"
	Filter Table = "filter"
	Mangle Table = "mangle"
)

// Builtin lists the chains that a table has by itself, in the order in which
// they are printed.
func (t Table) Builtin() []string {
	switch t {
	case NAT:
		return []string{"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"}
	case Filter:
		return []string{"INPUT", "FORWARD", "OUTPUT"}
	case Mangle:
		return []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}
	}
	return nil
}

// Tables is the packet filter of one family in one store. Its methods may be
// called from several goroutines.
type Tables interface {
	Family() Family
	Store() Store
	// Save calls line for each line of the table as iptables-save prints it,
	// without comments; the slice is valid during the call only. A table that
	// does not exist has no lines. It ends at the first error of line.
	Save(ctx context.Context, t Table, line func([]byte) error) error
	// Restore carries out what input writes, in iptables-restore's language and
	// with --noflush: each part up to a COMMIT happens as a whole or not at all,
	// and nothing after the first part that fails. A failure that the input
	// causes is a *RestoreError.
	Restore(ctx context.Context, input func(*bufio.Writer) error) error
	// Watch calls suspect, with what was seen, when others may have changed
	// chains that ours accepts, or rules that lead to them, until ctx ends.
	// Changes by Restore do not count. What is suspected need not be true. It calls ready
	// once it sees changes.
	Watch(ctx context.Context, ours func(chain string) bool, ready func(), suspect func(what string)) error
}

// RestoreError is a failed Restore.
type RestoreError struct {
	// Line is the input's line, counted from 1, that was refused; 0 if it is not
	// known, as when the kernel refuses a legacy table as a whole.
	Line int
	// Busy: a lock or a resource was not available, the input may be right.
	Busy   bool
	Output string // what the program said
	Err    error  // how it ended
}

func (e *RestoreError) Error() string {
	said := strings.Join(strings.Fields(e.Output), " ")
	if said == "" {
		return e.Err.Error()
	}
	return fmt.Sprintf("%v: %s", e.Err, said)
}

func (e *RestoreError) Unwrap() error { return e.Err }

// ErrUnsupported is wrapped by errors about a family or a store that this host
// does not have.
var ErrUnsupported = errors.New("not supported by this host")

// LockWait is told how long a Restore waited for the lock that all users of the
// legacy store share.
type LockWait func(time.Duration)

// saveLine strips what is no content from a line of iptables-save; nil for
// comments, empty lines and the end.
func saveLine(line []byte) []byte {
	if len(line) == 0 || line[0] == '#' || string(line) == "COMMIT" {
		return nil
	}
	return line
}

// eachLine calls f for the content lines that r has.
func eachLine(r io.Reader, f func([]byte) error) error {
	in := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := in.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			return fmt.Errorf("a line of more than %d bytes", in.Size())
		}
		if n := len(line); n > 0 && line[n-1] == '\n' {
			line = line[:n-1]
		}
		if content := saveLine(line); content != nil {
			if err := f(content); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
