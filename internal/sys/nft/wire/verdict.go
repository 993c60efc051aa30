package wire

// Verdict is what a verdict map's element says. The zero Verdict is none.
type Verdict struct {
	Code  VerdictCode
	Chain string // of Goto and Jump
}

// VerdictCode is a kind of Verdict.
type VerdictCode uint8

const (
	NoVerdict VerdictCode = iota
	Accept
	Drop
	Return
	Goto
	Jump
)

func (v Verdict) String() string {
	s := [...]string{"none", "accept", "drop", "return", "goto", "jump"}[v.Code]
	if v.Chain != "" {
		s += " " + v.Chain
	}
	return s
}
