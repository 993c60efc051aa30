package nft

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Present reports whether a table is there. A kernel without nf_tables, or without the
// family, has none.
func Present(ctx context.Context, t Tables, table Table) (bool, error) {
	exists, err := t.Exists(ctx, table)
	if Lacks(err) {
		return false, nil
	}
	return exists, err
}

// Remove deletes a table while packets pass it, and reports whether it was there.
//
// The base chains go first, in a commit of their own. A packet on its way through a
// table that is deleted whole can find the maps empty already and the sets still full
// (seen on Linux 6.18): in a table that refuses what is in a set and not in a map, it
// would be refused although another table, whose turn comes next, forwards it.
func Remove(ctx context.Context, t Tables, table Table) (bool, error) {
	removed, err := remove(ctx, t, table)
	if err != nil {
		return false, fmt.Errorf("remove table %s: %w", table, err)
	}
	return removed, nil
}

func remove(ctx context.Context, t Tables, table Table) (bool, error) {
	if there, err := Present(ctx, t, table); err != nil || !there {
		return false, err
	}
	err := Unhook(ctx, t, table, "")
	if err == nil {
		err = t.Commit(ctx, []Op{{Kind: DeleteTable, Table: table}})
	}
	if errors.Is(err, ErrNoTable) || errors.Is(err, ErrNotExist) {
		return false, nil // somebody was faster
	}
	return err == nil, err
}

// Unhook deletes the base chains of a table that are of a type, "" any, so that no
// packet gets there any more. One that is not there has none.
func Unhook(ctx context.Context, t Tables, table Table, typ string) error {
	base, err := BaseChains(ctx, t, table, typ)
	if err != nil || len(base) == 0 {
		return err
	}
	var steps []Op
	for _, name := range base {
		steps = append(steps, Op{Kind: DeleteChain, Table: table, Name: name})
	}
	return t.Commit(ctx, steps)
}

// BaseChains lists the base chains of a table that are of a type, "" any. A kernel
// without nf_tables, or without the table, has none.
func BaseChains(ctx context.Context, t Tables, table Table, typ string) ([]string, error) {
	if there, err := Present(ctx, t, table); err != nil || !there {
		return nil, err
	}
	c, err := t.ReadSome(ctx, table, func(*Set) bool { return false })
	if errors.Is(err, ErrNoTable) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []string
	for name, ch := range c.Chains {
		if ch.Hook != nil && (typ == "" || ch.Hook.Type == typ) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out, nil
}
