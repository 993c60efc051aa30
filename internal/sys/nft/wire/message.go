// Package wire has the form in which nf_tables and user space speak: attributes,
// verdicts, the expressions of rules, and the user data in which the program nft
// keeps comments. It does no I/O.
package wire

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Message builds the attributes of a netlink message.
type Message struct{ Buf []byte }

// Bytes appends an attribute.
func (w *Message) Bytes(typ uint16, b []byte) {
	at := w.Open(typ)
	w.Buf = append(w.Buf, b...)
	w.Close(at)
}

// Text appends a string with a final zero byte.
func (w *Message) Text(typ uint16, s string) {
	at := w.Open(typ)
	w.Buf = append(append(w.Buf, s...), 0)
	w.Close(at)
}

// Number appends four bytes in network order.
func (w *Message) Number(typ uint16, n uint32) {
	at := w.Open(typ)
	w.Buf = binary.BigEndian.AppendUint32(w.Buf, n)
	w.Close(at)
}

// Nest appends an attribute that holds others.
func (w *Message) Nest(typ uint16, fill func()) {
	at := w.Open(typ | unix.NLA_F_NESTED)
	fill()
	w.Close(at)
}

// Open begins an attribute, which Close ends.
func (w *Message) Open(typ uint16) int {
	at := len(w.Buf)
	w.Buf = binary.NativeEndian.AppendUint16(w.Buf, 0)
	w.Buf = binary.NativeEndian.AppendUint16(w.Buf, typ)
	return at
}

// Close ends the attribute that Open began at a place.
func (w *Message) Close(at int) {
	binary.NativeEndian.PutUint16(w.Buf[at:], uint16(len(w.Buf)-at))
	for len(w.Buf)%unix.NLA_ALIGNTO != 0 {
		w.Buf = append(w.Buf, 0)
	}
}

// Data appends nested data.
func (w *Message) Data(typ uint16, t string) {
	at := w.Open(typ | unix.NLA_F_NESTED)
	in := w.Open(unix.NFTA_DATA_VALUE)
	w.Buf = append(w.Buf, t...)
	w.Close(in)
	w.Close(at)
}

// Verdict appends the inside of data that is a verdict.
func (w *Message) Verdict(v Verdict) {
	at := w.Open(unix.NFTA_DATA_VERDICT | unix.NLA_F_NESTED)
	w.Number(unix.NFTA_VERDICT_CODE, uint32(v.Code.number()))
	if v.Chain != "" {
		w.Text(unix.NFTA_VERDICT_CHAIN, v.Chain)
	}
	w.Close(at)
}

// Userdata appends one entry of the user data in which nft keeps comments and hints.
func Userdata(b []byte, typ byte, data []byte) []byte {
	return append(append(b, typ, byte(len(data))), data...)
}

// CutComment is as much of a comment as fits.
func CutComment(s string) string {
	const most = 127
	return s[:min(len(s), most)]
}

// Comment is user data of one comment, cut to what fits.
func Comment(typ byte, s string) []byte {
	return Userdata(nil, typ, append([]byte(CutComment(s)), 0))
}

// Comment appends an attribute of user data that is one comment, cut to what fits.
func (w *Message) Comment(typ uint16, kind byte, s string) {
	s = CutComment(s)
	at := w.Open(typ)
	w.Buf = append(append(append(w.Buf, kind, byte(len(s)+1)), s...), 0)
	w.Close(at)
}

// CommentOf finds a comment in user data.
func CommentOf(b []byte, typ byte) string {
	for len(b) >= 2 {
		end := 2 + int(b[1])
		if end > len(b) {
			return ""
		}
		if b[0] == typ {
			return CString(b[2:end])
		}
		b = b[end:]
	}
	return ""
}

func (c VerdictCode) number() int32 {
	const nfDrop, nfAccept = 0, 1
	switch c {
	case Accept:
		return nfAccept
	case Drop:
		return nfDrop
	case Return:
		return unix.NFT_RETURN
	case Goto:
		return unix.NFT_GOTO
	case Jump:
		return unix.NFT_JUMP
	}
	return unix.NFT_CONTINUE
}

// ParseVerdict reads what [Message.Verdict] wrote.
func ParseVerdict(b []byte) Verdict {
	var v Verdict
	EachAttr(b, func(typ uint16, data []byte) {
		switch typ {
		case unix.NFTA_VERDICT_CODE:
			if len(data) == 4 {
				code := int32(binary.BigEndian.Uint32(data))
				for c := Accept; c <= Jump; c++ {
					if c.number() == code {
						v.Code = c
					}
				}
			}
		case unix.NFTA_VERDICT_CHAIN:
			v.Chain = CString(data)
		}
	})
	return v
}

// EachAttr calls f with each attribute; one that is cut off ends it.
func EachAttr(b []byte, f func(typ uint16, data []byte)) {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}
