package nft

import (
	"context"
	"errors"
	"fmt"

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
		err := t.Commit(ctx, ops)
		switch {
		case errors.Is(err, unix.EPERM):
			return fmt.Errorf("CAP_NET_ADMIN is missing; run as root or grant it: %w", err)
		case err != nil:
			return fmt.Errorf("%s: missing; use a kernel with %s, Linux %s or newer, or load its modules: %w", n.What, n.Option, n.Since, err)
		}
	}
	return nil
}
