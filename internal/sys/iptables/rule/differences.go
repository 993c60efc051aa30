package rule

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Differences lists the rules in which two sets of chains differ, not counting words: "-"
// before what only have has, "+" before what only want has. label goes in front of the
// table's name.
func Differences(label string, have, want map[Chain][]byte) []string {
	all := map[Chain]struct{}{}
	for c := range have {
		all[c] = struct{}{}
	}
	for c := range want {
		all[c] = struct{}{}
	}
	var out []string
	for _, c := range slices.SortedFunc(maps.Keys(all), Chain.Compare) {
		h, exists := have[c]
		w, wanted := want[c]
		where := fmt.Sprintf(" %s %s: ", label, c.Table())
		switch {
		case exists && !wanted:
			out = append(out, "-"+where+":"+c.String())
		case wanted && !exists:
			out = append(out, "+"+where+":"+c.String())
		}
		if NormalText(h) == NormalText(w) {
			continue
		}
		for line := range bytes.Lines(h) {
			out = append(out, "-"+where+strings.TrimSuffix(string(line), "\n"))
		}
		for line := range bytes.Lines(w) {
			out = append(out, "+"+where+strings.TrimSuffix(string(line), "\n"))
		}
	}
	return out
}
