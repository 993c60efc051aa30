// Package nft is the seam to nf_tables: tables, chains, sets and maps, their
// elements, and rules made of a few typed statements, written in transactions and
// read back. This package has the words for it and no I/O; package kernel writes to
// the running kernel, package fake holds the same in memory and refuses the same,
// package walk carries packets through a listing, package wire has the form in which
// the kernel is spoken to.
//
// A new statement needs: its type and how it compiles (rule.go), its words in a
// listing (text.go), the shapes of its attributes (package wire), what it does to a
// packet (package walk, if modes are tested with it), and a line in everyRule in the
// test of package kernel, which shows that kernel and fake list it alike and that the
// program nft prints it. A new kind of set is a field of [Set], read and written in
// package kernel.
//
// It speaks netlink itself, above github.com/mdlayher/netlink: commits need the
// number of the refused message, rules need conntrack keys with a direction, and
// elements by the hundred thousand must cost little; the general libraries have
// none of the three.
//
// Only what is asked for by name is read: other tables of the host do not matter.
// Everything written can be listed by the program nft from 1.0.6 on.
package nft

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft/wire"
)

// Family is the address family of a table.
type Family uint8

const (
	IPv4 Family = unix.NFPROTO_IPV4
	IPv6 Family = unix.NFPROTO_IPV6
)

func (f Family) String() string {
	switch f {
	case IPv4:
		return "ip"
	case IPv6:
		return "ip6"
	}
	return fmt.Sprintf("family(%d)", uint8(f))
}

// Table names a table.
type Table struct {
	Family Family
	Name   string
}

func (t Table) String() string { return t.Family.String() + " " + t.Name }

// Hook is a point of a packet's path at which a base chain is called.
type Hook struct {
	Type     string // "nat" or "filter"
	Num      HookNum
	Priority int32
	Drops    bool // the policy; nothing here asks for it
}

// HookNum is a netfilter hook.
type HookNum uint32

const (
	Prerouting  HookNum = unix.NF_INET_PRE_ROUTING
	Input       HookNum = unix.NF_INET_LOCAL_IN
	Forward     HookNum = unix.NF_INET_FORWARD
	Output      HookNum = unix.NF_INET_LOCAL_OUT
	Postrouting HookNum = unix.NF_INET_POST_ROUTING
)

func (h HookNum) String() string {
	return [...]string{"prerouting", "input", "forward", "output", "postrouting"}[h]
}

// Chain is a chain without its rules.
type Chain struct {
	Name    string
	Hook    *Hook // nil: reached from other chains only
	Comment string
}

// Set declares a set, or a map if Data or Verdicts is set.
type Set struct {
	Name     string
	Key      []Type
	Data     []Type
	Verdicts bool   // a map to verdicts
	Interval bool   // elements are ends of ranges; one field only
	Dynamic  bool   // rules add elements, each of which has a time of expiry
	Size     uint32 // most elements; 0: any number
	Comment  string
}

// IsMap reports whether elements carry something.
func (s *Set) IsMap() bool { return s.Verdicts || len(s.Data) > 0 }

// KeyLen is the length of its keys in bytes, DataLen that of its data.
func (s *Set) KeyLen() int  { return tupleLen(s.Key) }
func (s *Set) DataLen() int { return tupleLen(s.Data) }

// Element is an element of a set or map.
type Element struct {
	Key     Tuple
	End     bool  // of an interval set: the first key behind a range
	Data    Tuple // of a map
	Verdict Verdict
	Comment string // up to 127 bytes count
	// Timeout is the time after which a dynamic set's element goes; it is not
	// read back.
	Timeout time.Duration
}

// CutComment is as much of a comment as the kernel keeps, so that it comes back as it
// is written.
func CutComment(s string) string { return wire.CutComment(s) }

// Verdict is what a verdict map's element says. The zero Verdict is none.
type Verdict = wire.Verdict

// Codes of a Verdict.
const (
	NoVerdict = wire.NoVerdict
	Accept    = wire.Accept
	Drop      = wire.Drop
	Return    = wire.Return
	Goto      = wire.Goto
	Jump      = wire.Jump
)

// VerdictCode is a kind of Verdict.
type VerdictCode = wire.VerdictCode

// Kind is what an Op does.
type Kind uint8

const (
	AddTable Kind = iota
	DeleteTable
	AddChain
	DeleteChain // with its rules
	FlushChain  // deletes its rules
	AddRule     // at the end of its chain
	AddSet
	DeleteSet // with its elements
	FlushSet  // deletes its elements
	AddElements
	DeleteElements
)

func (k Kind) String() string {
	return [...]string{
		"add table", "delete table", "add chain", "delete chain", "flush chain", "add rule", "add set", "delete set",
		"flush set", "add elements", "delete elements",
	}[k]
}

// Op is one step of a transaction.
type Op struct {
	Kind  Kind
	Table Table
	Name  string // of a chain or a set, where neither is given whole

	Comment  string // AddTable
	Chain    *Chain // AddChain
	Rule     *Rule  // AddRule
	Set      *Set   // AddSet, AddElements, DeleteElements
	Elements []Element
	// Owner is what an [Error] on this step names. Not used otherwise.
	Owner any
}

func (o *Op) String() string {
	name := o.Name
	switch {
	case o.Chain != nil:
		name = o.Chain.Name
	case o.Set != nil:
		name = o.Set.Name
	}
	s := o.Kind.String() + " " + o.Table.String()
	if name != "" {
		s += " " + name
	}
	return s
}

// Error is a refused transaction: nothing of it happened.
type Error struct {
	Op  *Op // the first step that was refused; nil if the whole was
	Err error
}

func (e *Error) Error() string {
	if e.Op == nil {
		return fmt.Sprintf("nftables transaction: %v", e.Err)
	}
	return fmt.Sprintf("nftables: %s: %v", e.Op, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// Errors that callers distinguish.
var (
	ErrNotExist = unix.ENOENT // what a step names is not there
	ErrBusy     = unix.EBUSY  // something still refers to what a step deletes
	ErrExist    = unix.EEXIST // an element is there with other data
)

// ErrNoTable is returned by Read for a table that is not there.
var ErrNoTable = errors.New("no such table")

// Event is a change of a table by somebody else.
type Event struct {
	Table Table  // none if it is not known which
	What  string // "set services was deleted"
	// Set and Keys say exactly what changed if that were elements only.
	Set  string
	Keys []Tuple
	// Rules: only chains and rules changed.
	Rules bool
	// More events of the same commit follow.
	More bool
}

// Tables is a network namespace's nf_tables. Commit and the readers may be used by
// one goroutine at a time, Watch beside them.
type Tables interface {
	// Commit carries out all steps or none, in the kernel's one commit. A
	// refused step makes an *Error.
	Commit(ctx context.Context, ops []Op) error
	// Read returns a table with everything in it but the elements of dynamic
	// sets, or ErrNoTable.
	Read(ctx context.Context, t Table) (*Contents, error)
	// ReadSome is Read without the elements of sets that want refuses.
	ReadSome(ctx context.Context, t Table, want func(*Set) bool) (*Contents, error)
	// Lookup returns those elements of a set that have one of the keys. Not for
	// interval sets.
	Lookup(ctx context.Context, t Table, s *Set, keys []Tuple) ([]Element, error)
	// Exists reports whether a table is there.
	Exists(ctx context.Context, t Table) (bool, error)
	// Elements calls f with the elements of one set. A set that is not there has
	// none.
	Elements(ctx context.Context, t Table, s *Set, f func(Element)) error
	// Others returns a number that changes with every commit that was not made by
	// Commit, whatever the table.
	Others(ctx context.Context) (uint32, error)
	// Watch calls f for what others change in tables that ours accepts, until ctx
	// ends, and returns why it ended. f is also told if something may have been
	// missed. ready is closed once it looks.
	Watch(ctx context.Context, ours func(Table) bool, ready chan<- struct{}, f func(Event)) error
	// Close releases what the others use; they open it again.
	Close() error
}

// Contents is a table as it is there.
type Contents struct {
	Table    Table
	Comment  string
	Dormant  bool // its chains are not called
	Chains   map[string]*ChainContents
	Sets     map[string]*Set
	Elements map[string][]Element // by set, dynamic sets apart
}

// ChainContents is a chain with its rules.
type ChainContents struct {
	Chain
	Rules []*Rule
}
