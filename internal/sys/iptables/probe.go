package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// HintChain is the chain of table mangle in which kubelet leaves word of the
// store that the node uses.
const HintChain = "KUBE-IPTABLES-HINT"

// Choice is what Find found.
type Choice struct {
	Use   Tables
	Other Tables // the other store, nil if its programs are missing
	Why   string // for the log
}

// Finder finds the iptables programs and the store that the node uses.
//
// The programs are looked for in Path as a shell would: the first directory with
// an iptables-restore, plain or with the store in its name, decides. If that
// directory only has the plain name, somebody put it there on purpose and it is
// used, whatever store it speaks to. Else both stores are reachable and the first
// of these decides: the store with [HintChain]; the store in which others have more
// rules; the store in which we have more; nft.
type Finder struct {
	Path     string // as in the environment variable PATH
	Proc     string // where procfs is mounted
	LockWait LockWait
	// Run returns what a program prints, at most limit bytes of it.
	Run func(ctx context.Context, limit int, program string, args ...string) ([]byte, error)
	// Exists reports whether there is a program at the path.
	Exists func(path string) bool
	// Ours tells our own chains from others'.
	Ours func(t Table, chain string) bool
}

// NewFinder returns a Finder for this process's environment.
func NewFinder(ours func(Table, string) bool, wait LockWait) *Finder {
	return &Finder{
		Path: os.Getenv("PATH"), Proc: "/proc", LockWait: wait, Ours: ours,
		Run: runProgram,
		Exists: func(path string) bool {
			st, err := os.Stat(path)
			return err == nil && !st.IsDir() && st.Mode()&0o111 != 0
		},
	}
}

// fallbackPath is searched when nothing is found in the given one: services are
// often started without the sbin directories.
const fallbackPath = "/usr/sbin:/sbin:/usr/local/sbin"

func runProgram(ctx context.Context, limit int, program string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	said := &head{}
	cmd.Stderr = said
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	b := make([]byte, 0, 4096)
	for len(b) < limit && err == nil {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		var n int
		n, err = out.Read(b[len(b):min(cap(b), limit)])
		b = b[:len(b)+n]
	}
	if len(b) >= limit {
		cancel() // enough is known
		_ = cmd.Wait()
		return b, nil
	}
	if err := cmd.Wait(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", program, err, said)
	}
	return b, nil
}

// programs are the paths of one store's programs.
type programs struct{ save, restore string }

// tool returns the name of the iptables program of a family: base is "iptables".
func tool(f Family, store, what string) string {
	name := "iptables"
	if f == IPv6 {
		name = "ip6tables"
	}
	return name + store + what
}

func (p *Finder) in(dir string, f Family, store string) (programs, bool) {
	out := programs{filepath.Join(dir, tool(f, store, "-save")), filepath.Join(dir, tool(f, store, "-restore"))}
	return out, p.Exists(out.save) && p.Exists(out.restore)
}

// find returns the programs by store, as described at Finder, and whether the
// choice is already made. What speaks to no store is not listed.
func (p *Finder) find(ctx context.Context, f Family) (map[Store]programs, bool, error) {
	for _, path := range []string{p.Path, fallbackPath} {
		found := map[Store]programs{}
		for _, dir := range filepath.SplitList(path) {
			plain, hasPlain := p.in(dir, f, "")
			legacy, hasLegacy := p.in(dir, f, "-legacy")
			nft, hasNFT := p.in(dir, f, "-nft")
			if hasPlain && !hasLegacy && !hasNFT && len(found) == 0 {
				s, err := p.speaks(ctx, plain)
				if err != nil {
					return nil, false, err
				}
				found[s] = plain
				p.addOther(found, path, f, s)
				return found, true, nil
			}
			if _, have := found[Legacy]; hasLegacy && !have {
				found[Legacy] = legacy
			}
			if _, have := found[NFT]; hasNFT && !have {
				found[NFT] = nft
			}
		}
		if len(found) > 0 {
			return found, false, nil
		}
	}
	return nil, false, fmt.Errorf("%s is neither in PATH (%s) nor in %s: install the package iptables: %w",
		tool(f, "", "-restore"), p.Path, fallbackPath, ErrUnsupported)
}

// addOther adds the programs of the store that is not s, if there are any.
func (p *Finder) addOther(found map[Store]programs, path string, f Family, s Store) {
	other, suffix := NFT, "-nft"
	if s == NFT {
		other, suffix = Legacy, "-legacy"
	}
	for _, dir := range filepath.SplitList(path) {
		if pr, ok := p.in(dir, f, suffix); ok {
			found[other] = pr
			return
		}
	}
}

// speaks asks plain programs for their store: "iptables-restore v1.8.9 (nf_tables)".
func (p *Finder) speaks(ctx context.Context, pr programs) (Store, error) {
	out, err := p.Run(ctx, 4096, pr.restore, "--version")
	if err != nil {
		return 0, fmt.Errorf("ask for the version of iptables: %w", err)
	}
	if bytes.Contains(out, []byte("nf_tables")) {
		return NFT, nil
	}
	return Legacy, nil // before 1.8 there was no other
}

// Find returns the tables to use for a family. An error that wraps ErrUnsupported
// says what the host lacks.
func (p *Finder) Find(ctx context.Context, f Family) (Choice, error) {
	if err := p.ipv6(f); err != nil {
		return Choice{}, err
	}
	found, decided, err := p.find(ctx, f)
	if err != nil {
		return Choice{}, err
	}
	store, why := NFT, "nothing says otherwise"
	switch {
	case decided:
		why = "a plain iptables-restore comes first in PATH"
		for s, pr := range found {
			if strings.HasSuffix(pr.restore, string(filepath.Separator)+tool(f, "", "-restore")) {
				store = s
			}
		}
	case len(found) == 1:
		for s := range found {
			store, why = s, "only its programs are installed"
		}
	default:
		store, why = p.inUse(ctx, f, found)
	}
	c := Choice{Use: p.tables(f, store, found[store]), Why: why}
	if err := p.hasNAT(ctx, f, found[store]); err != nil {
		return Choice{}, err
	}
	if pr, ok := found[1-store]; ok {
		c.Other = p.tables(f, 1-store, pr)
	}
	return c, nil
}

func (p *Finder) tables(f Family, s Store, pr programs) Tables {
	return NewCommand(f, s, pr.save, pr.restore, p.LockWait)
}

// All returns the tables of every store that the host has programs for, for
// clean-up. An error says that there are none.
func (p *Finder) All(ctx context.Context, f Family) ([]Tables, error) {
	if err := p.ipv6(f); err != nil {
		return nil, err
	}
	found, _, err := p.find(ctx, f)
	if err != nil {
		return nil, err
	}
	var out []Tables
	for _, s := range []Store{Legacy, NFT} {
		if pr, ok := found[s]; ok {
			out = append(out, p.tables(f, s, pr))
		}
	}
	return out, nil
}

// inUse decides between the two stores.
func (p *Finder) inUse(ctx context.Context, f Family, found map[Store]programs) (Store, string) {
	var own, foreign [2]int
	for _, s := range []Store{NFT, Legacy} {
		if s == Legacy && !legacyHas(p.Proc, f, Mangle) {
			continue
		}
		out, err := p.Run(ctx, mostCounted, found[s].save, "-t", string(Mangle))
		if err == nil && bytes.Contains(out, []byte("\n:"+HintChain+" ")) {
			return s, "kubelet's hint " + HintChain + " is there"
		}
	}
	for _, s := range []Store{NFT, Legacy} {
		for _, t := range []Table{NAT, Filter, Mangle} {
			if s == Legacy && !legacyHas(p.Proc, f, t) {
				continue
			}
			out, err := p.Run(ctx, mostCounted, found[s].save, "-t", string(t))
			if err != nil {
				continue // a store that cannot be read holds no rules
			}
			o, n := p.count(t, out)
			own[s], foreign[s] = own[s]+o, foreign[s]+n
		}
	}
	switch {
	case foreign[Legacy] > foreign[NFT]:
		return Legacy, "others have more rules there"
	case foreign[Legacy] < foreign[NFT]:
		return NFT, "others have more rules there"
	case own[Legacy] > own[NFT]:
		return Legacy, "our rules are there"
	case own[NFT] > 0:
		return NFT, "our rules are there"
	}
	return NFT, "neither store has rules"
}

// mostCounted bounds how much of a table is looked at to see who uses it, in bytes.
const mostCounted = 1 << 20

// count returns the numbers of rules in our own chains and in others.
func (p *Finder) count(t Table, out []byte) (own, foreign int) {
	for line := range bytes.Lines(out) {
		rest, ok := bytes.CutPrefix(line, []byte("-A "))
		if !ok {
			continue
		}
		chain, rule, _ := bytes.Cut(rest, []byte(" "))
		if p.Ours(t, string(chain)) || p.Ours(t, jumpOf(string(rule))) {
			own++
		} else {
			foreign++
		}
	}
	return own, foreign
}

// legacyHas reports whether the legacy store has the table in this network
// namespace already: reading one that it does not have would create it. If that
// cannot be told, it is supposed.
func legacyHas(proc string, f Family, t Table) bool {
	name := "ip_tables_names"
	if f == IPv6 {
		name = "ip6_tables_names"
	}
	b, err := os.ReadFile(filepath.Join(proc, "thread-self/net", name))
	if errors.Is(err, fs.ErrNotExist) {
		return false // ip_tables is not even loaded
	}
	if err != nil {
		return true
	}
	for line := range bytes.Lines(b) {
		if string(bytes.TrimSpace(line)) == string(t) {
			return true
		}
	}
	return false
}

// ipv6 returns nil unless f is IPv6 and the host has it off.
func (p *Finder) ipv6(f Family) error {
	if f != IPv6 {
		return nil
	}
	if _, err := os.Stat(filepath.Join(p.Proc, "thread-self/net/if_inet6")); err != nil {
		return fmt.Errorf("the kernel has no IPv6 (%s is missing): %w", filepath.Join(p.Proc, "thread-self/net/if_inet6"), ErrUnsupported)
	}
	b, err := os.ReadFile(filepath.Join(p.Proc, "sys/net/ipv6/conf/all/disable_ipv6"))
	if err == nil && strings.TrimSpace(string(b)) == "1" {
		return fmt.Errorf("IPv6 is off (net.ipv6.conf.all.disable_ipv6 = 1): %w", ErrUnsupported)
	}
	return nil
}

// hasNAT returns nil if the kernel has a nat table for the family.
func (p *Finder) hasNAT(ctx context.Context, f Family, pr programs) error {
	program := strings.TrimSuffix(pr.restore, "-restore")
	if !p.Exists(program) {
		return nil // the first write will tell
	}
	if _, err := p.Run(ctx, 1<<16, program, "-w", "5", "-t", string(NAT), "-S", "POSTROUTING"); err != nil {
		if strings.Contains(err.Error(), "Permission denied") { // the programs say it in the same words
			return fmt.Errorf("the table nat cannot be read for %s without CAP_NET_ADMIN: run as root: %w (%w)", f, err, ErrUnsupported)
		}
		return fmt.Errorf("there is no table nat for %s; load the kernel module %s_nat or build a kernel with it: %w (%w)",
			f, map[Family]string{IPv4: "iptable", IPv6: "ip6table"}[f], err, ErrUnsupported)
	}
	return nil
}
