package nft

import (
	"context"
	"fmt"
)

// DryRun is Tables whose commits are not carried out, only written down: a line for
// each object and element, "+" before what is added, "-" before what goes.
type DryRun struct {
	Tables
	Lines []string
}

// Commit implements Tables.
func (d *DryRun) Commit(_ context.Context, ops []Op) error {
	for i := range ops {
		d.note(&ops[i])
	}
	return nil
}

func (d *DryRun) note(o *Op) {
	add := func(sign, format string, args ...any) {
		d.Lines = append(d.Lines, sign+" "+o.Table.Family.String()+" "+fmt.Sprintf(format, args...))
	}
	switch o.Kind {
	case AddTable:
		add("+", "table %s", o.Table.Name)
	case DeleteTable:
		add("-", "table %s", o.Table.Name)
	case AddChain:
		add("+", "chain %s", o.Chain.Name)
	case DeleteChain:
		add("-", "chain %s", o.Name)
	case FlushChain:
		add("-", "chain %s: other rules", o.Name)
	case AddRule:
		add("+", "chain %s: %s", o.Name, o.Rule)
	case AddSet:
		add("+", "%s", o.Set)
	case DeleteSet:
		add("-", "set %s", o.Name)
	case FlushSet:
		add("-", "%s: other elements", o.Name)
	case AddElements, DeleteElements:
		sign := map[bool]string{true: "+", false: "-"}[o.Kind == AddElements]
		for j := range o.Elements {
			add(sign, "%s: %s", o.Set.Name, o.Set.ElementText(&o.Elements[j]))
		}
	}
}
