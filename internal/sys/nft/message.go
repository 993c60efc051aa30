package nft

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// message builds the attributes of a netlink message.
type message struct{ buf []byte }

// bytes appends an attribute.
func (w *message) bytes(typ uint16, b []byte) {
	at := w.open(typ)
	w.buf = append(w.buf, b...)
	w.close(at)
}

func (w *message) text(typ uint16, s string) {
	at := w.open(typ)
	w.buf = append(append(w.buf, s...), 0)
	w.close(at)
}

// number appends four bytes in network order.
func (w *message) number(typ uint16, n uint32) {
	at := w.open(typ)
	w.buf = binary.BigEndian.AppendUint32(w.buf, n)
	w.close(at)
}

// nest appends an attribute that holds others.
func (w *message) nest(typ uint16, fill func()) {
	at := w.open(typ | unix.NLA_F_NESTED)
	fill()
	w.close(at)
}

func (w *message) open(typ uint16) int {
	at := len(w.buf)
	w.buf = binary.NativeEndian.AppendUint16(w.buf, 0)
	w.buf = binary.NativeEndian.AppendUint16(w.buf, typ)
	return at
}

func (w *message) close(at int) {
	binary.NativeEndian.PutUint16(w.buf[at:], uint16(len(w.buf)-at))
	for len(w.buf)%unix.NLA_ALIGNTO != 0 {
		w.buf = append(w.buf, 0)
	}
}

// tuple appends nested data.
func (w *message) tuple(typ uint16, t Tuple) {
	at := w.open(typ | unix.NLA_F_NESTED)
	in := w.open(unix.NFTA_DATA_VALUE)
	w.buf = append(w.buf, t...)
	w.close(in)
	w.close(at)
}

// verdict appends the inside of data that is a verdict.
func (w *message) verdict(v Verdict) {
	at := w.open(unix.NFTA_DATA_VERDICT | unix.NLA_F_NESTED)
	w.number(unix.NFTA_VERDICT_CODE, uint32(v.Code.kernel()))
	if v.Chain != "" {
		w.text(unix.NFTA_VERDICT_CHAIN, v.Chain)
	}
	w.close(at)
}

// userdata appends one entry of the user data in which nft keeps comments and hints.
func userdata(b []byte, typ byte, data []byte) []byte {
	return append(append(b, typ, byte(len(data))), data...)
}

// comment is user data of one comment, cut to what fits.
func comment(typ byte, s string) []byte {
	const most = 127
	if len(s) > most {
		s = s[:most]
	}
	return userdata(nil, typ, append([]byte(s), 0))
}

// commentOf finds a comment in user data.
func commentOf(b []byte, typ byte) string {
	for len(b) >= 2 {
		end := 2 + int(b[1])
		if end > len(b) {
			return ""
		}
		if b[0] == typ {
			return cString(b[2:end])
		}
		b = b[end:]
	}
	return ""
}

func (c VerdictCode) kernel() int32 {
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

func parseVerdict(b []byte) Verdict {
	var v Verdict
	eachAttr(b, func(typ uint16, data []byte) {
		switch typ {
		case unix.NFTA_VERDICT_CODE:
			if len(data) == 4 {
				code := int32(binary.BigEndian.Uint32(data))
				for c := Accept; c <= Jump; c++ {
					if c.kernel() == code {
						v.Code = c
					}
				}
			}
		case unix.NFTA_VERDICT_CHAIN:
			v.Chain = cString(data)
		}
	})
	return v
}

// eachAttr calls f with each attribute; one that is cut off ends it.
func eachAttr(b []byte, f func(typ uint16, data []byte)) {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}
