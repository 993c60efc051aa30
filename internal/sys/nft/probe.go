package nft

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Need is something that the kernel must be able to do.
type Need struct {
	What   string // in nft's language
	Option string // of the kernel's configuration
	Since  string // the first version of Linux that has it
	Steps  []Op   // try it in a new table
}

// Probe tries each need, in a table that is made and deleted in the same transaction,
// so that nobody sees it. The error is about the first that is missing, with the
// remedy.
func Probe(ctx context.Context, t Tables, table Table, needs []Need) error {
	for _, n := range needs {
		ops := append([]Op{{Kind: AddTable}}, n.Steps...)
		ops = append(ops, Op{Kind: DeleteTable})
		for i := range ops {
			ops[i].Table = table
		}
		err := tryNeed(ctx, t, ops)
		switch {
		case ctx.Err() != nil || momentary(err):
			return fmt.Errorf("%s: could not be tried: %w", n.What, err)
		case errors.Is(err, unix.EPERM):
			return fmt.Errorf("CAP_NET_ADMIN is missing; run as root or grant it: %w", err)
		case err != nil:
			return fmt.Errorf("%s: missing; use a kernel with %s, Linux %s or newer, or load its modules: %w", n.What, n.Option, n.Since, err)
		}
	}
	return nil
}

// A kernel that is short of memory or busy says nothing of what it can do.
const (
	probeTries = 10
	probePause = 100 * time.Millisecond
)

// tryNeed commits ops, several times if it fails for a reason that passes.
func tryNeed(ctx context.Context, t Tables, ops []Op) error {
	for try := 1; ; try++ {
		err := t.Commit(ctx, ops)
		if !momentary(err) || try == probeTries {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(probePause):
		}
	}
}

// momentary reports whether the same call may succeed a moment later.
func momentary(err error) bool {
	for _, e := range []error{unix.ENOBUFS, unix.EAGAIN, unix.EBUSY, unix.EINTR, unix.ENOMEM} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// Lacks reports whether an error says that the kernel has no nf_tables, or not for
// the family.
func Lacks(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) ||
		errors.Is(err, unix.EINVAL)
}
