package wire

import (
	"math/rand/v2"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"
)

// What is written is read back the same.
func TestExpressionsComeBack(t *testing.T) {
	want := []Expr{
		{Name: "payload", Attrs: []Attr{U32(unix.NFTA_PAYLOAD_DREG, FirstReg), U32(unix.NFTA_PAYLOAD_BASE, 1), U32(unix.NFTA_PAYLOAD_OFFSET, 16), U32(unix.NFTA_PAYLOAD_LEN, 4)}},
		{Name: "ct", Attrs: []Attr{U32(unix.NFTA_CT_DREG, FirstReg), U32(unix.NFTA_CT_KEY, 20), U8(unix.NFTA_CT_DIRECTION, 0)}},
		{Name: "cmp", Attrs: []Attr{U32(unix.NFTA_CMP_SREG, FirstReg), U32(unix.NFTA_CMP_OP, 0), Value(unix.NFTA_CMP_DATA, []byte{6})}},
		{Name: "dynset", Attrs: []Attr{Str(unix.NFTA_DYNSET_SET_NAME, "clients"), U64(unix.NFTA_DYNSET_TIMEOUT, 10_800_000)}},
		{Name: "immediate", Attrs: []Attr{U32(unix.NFTA_IMMEDIATE_DREG, VerdictReg), VerdictAttr(unix.NFTA_IMMEDIATE_DATA, Verdict{Code: Goto, Chain: "there"})}},
	}
	var m Message
	PutExprs(&m, want)
	if have := ParseExprs(m.Buf); !reflect.DeepEqual(have, want) {
		t.Errorf("come back as\n%v\nwant\n%v", have, want)
	}
}

// The kernel's way to say the same is no difference.
func TestDefaultsDoNotCount(t *testing.T) {
	bare := Expr{Name: "nat", Attrs: []Attr{U32(unix.NFTA_NAT_TYPE, 1), U32(unix.NFTA_NAT_REG_ADDR_MIN, FirstReg), U32(unix.NFTA_NAT_REG_PROTO_MIN, FirstReg+1)}}
	told := Expr{Name: "nat", Attrs: []Attr{
		U32(unix.NFTA_NAT_TYPE, 1), U32(unix.NFTA_NAT_REG_ADDR_MIN, unix.NFT_REG_1), U32(unix.NFTA_NAT_REG_ADDR_MAX, unix.NFT_REG_1),
		U32(unix.NFTA_NAT_REG_PROTO_MIN, FirstReg+1), U32(unix.NFTA_NAT_REG_PROTO_MAX, FirstReg+1), U32(unix.NFTA_NAT_FLAGS, 3),
	}}
	var m Message
	PutExprs(&m, []Expr{told})
	if have := ParseExprs(m.Buf); !reflect.DeepEqual(have, []Expr{bare}) {
		t.Errorf("read is %v, want %v", have, bare)
	}
}

// Whatever comes from outside, reading ends and does not panic.
func FuzzParse(f *testing.F) {
	var m Message
	PutExprs(&m, []Expr{{Name: "lookup", Attrs: []Attr{Str(unix.NFTA_LOOKUP_SET, "services"), U32(unix.NFTA_LOOKUP_SREG, FirstReg)}}})
	f.Add(m.Buf)
	rng := rand.New(rand.NewPCG(1, 1))
	for range 50 {
		b := append([]byte(nil), m.Buf...)
		for range 3 {
			b[rng.IntN(len(b))] = byte(rng.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(_ *testing.T, b []byte) {
		ParseExprs(b)
		ParseVerdict(b)
		CommentOf(b, 0)
	})
}

func TestComments(t *testing.T) {
	long := make([]byte, 300)
	for i := range long {
		long[i] = 'x'
	}
	both := append(Userdata(nil, 3, []byte{1, 2}), Comment(7, "of a set")...)
	if have := CommentOf(both, 7); have != "of a set" {
		t.Errorf("the comment behind other data comes back as %q", have)
	}
	if have := CommentOf(Comment(0, string(long)), 0); len(have) != 127 {
		t.Errorf("a long comment comes back with %d bytes, want 127", len(have))
	}
}
