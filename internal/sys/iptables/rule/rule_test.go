package rule

import (
	"testing"
)

// Names cannot end a comment and become rules.
func TestCommentsHoldNoRules(t *testing.T) {
	have := Comment("a\"\nCOMMIT\n*nat\n-F 'x\\")
	if want := `-m comment --comment "a??COMMIT?*nat?-F ?x?"`; have != want {
		t.Errorf("have %s, want %s", have, want)
	}
}

func TestNormal(t *testing.T) {
	for _, c := range [][2]string{
		{"-A X -d 10.0.0.1/32 -p tcp -m comment --comment \"a b\" -m tcp --dport 80 -j Y", "-A X -p tcp -d 10.0.0.1 -m tcp --dport 80 -m comment --comment \"a b\" -j Y"},
		{"-A X -j MARK --or-mark 0x4000", "-A X -j MARK --set-xmark 0x4000/0x4000"},
		{"-A X -m statistic --mode random --probability 0.3333333333 -j Y", "-A X -m statistic --mode random --probability 0.33333333349 -j Y"},
		{"-A X -j REJECT", "-A X -j REJECT --reject-with icmp-port-unreachable"},
	} {
		if Normal(c[0]) != Normal(c[1]) {
			t.Errorf("%s and %s: %q, %q", c[0], c[1], Normal(c[0]), Normal(c[1]))
		}
	}
	if Normal("-A X ! -s 10.0.0.0/8 -j Y") == Normal("-A X -s 10.0.0.0/8 -j Y") {
		t.Error("a negation gets lost")
	}
}
