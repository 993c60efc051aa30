package nft

import "crypto/sha256"

// Object is a chain with its rules, or a set with fixed elements.
type Object struct {
	Chain    *Chain
	Rules    func() []*Rule // of Chain
	Set      *Set
	Elements []Element // of Set
}

// NewChain makes a chain that others lead to.
func NewChain(name, comment string, rules ...*Rule) Object {
	return Object{Chain: &Chain{Name: name, Comment: comment}, Rules: func() []*Rule { return rules }}
}

// NewHooked makes a chain that the kernel calls.
func NewHooked(name, typ string, num HookNum, priority int32, rules ...*Rule) Object {
	o := NewChain(name, "", rules...)
	o.Chain.Hook = &Hook{Type: typ, Num: num, Priority: priority}
	return o
}

// Name is the chain's or the set's.
func (o *Object) Name() string {
	if o.Set != nil {
		return o.Set.Name
	}
	return o.Chain.Name
}

// Sum stands for the object's content, to compare.
func (o *Object) Sum() [sha256.Size]byte {
	if o.Set != nil {
		return SetSum(o.Set, o.Elements)
	}
	return ChainSum(o.Chain, o.Rules())
}

// Steps make the object, or replace what is in it. The table is left to the caller.
func (o *Object) Steps(exists bool) []Op {
	var ops []Op
	switch {
	case o.Set != nil && exists:
		ops = append(ops, Op{Kind: FlushSet, Name: o.Set.Name})
	case o.Set != nil:
		ops = append(ops, Op{Kind: AddSet, Set: o.Set})
	case exists:
		ops = append(ops, Op{Kind: FlushChain, Name: o.Chain.Name})
	default:
		ops = append(ops, Op{Kind: AddChain, Chain: o.Chain})
	}
	if o.Set != nil {
		if len(o.Elements) > 0 {
			ops = append(ops, Op{Kind: AddElements, Set: o.Set, Elements: o.Elements})
		}
		return ops
	}
	for _, r := range o.Rules() {
		ops = append(ops, Op{Kind: AddRule, Name: o.Chain.Name, Rule: r})
	}
	return ops
}
