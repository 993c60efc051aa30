package main

import (
	"bufio"
	"fmt"
	"io"
	"regexp"
	"strings"
)

// expectedSkip covers the skips of matching tests whose reason contains words.
type expectedSkip struct {
	pkg, test *regexp.Regexp
	words     string
}

type skipList []expectedSkip

// readSkipList parses lines of "PACKAGE TEST WORDS...": PACKAGE is the end of an
// import path, TEST a test's name, "*" in both stands for any text, and WORDS
// must be part of the skip's reason. Blank lines and those that begin with # are
// comments.
func readSkipList(r io.Reader) (skipList, error) {
	var list skipList
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 3 {
			return nil, fmt.Errorf("line %d: %q: want a package, a test and words of the reason", n, line)
		}
		list = append(list, expectedSkip{
			pkg:   pattern(`(^|.*/)`, fields[0]),
			test:  pattern(`^`, fields[1]),
			words: strings.Join(fields[2:], " "),
		})
	}
	return list, lines.Err()
}

// pattern is before, then glob with "*" for any text, to the end.
func pattern(before, glob string) *regexp.Regexp {
	parts := strings.Split(glob, "*")
	for i, p := range parts {
		parts[i] = regexp.QuoteMeta(p)
	}
	return regexp.MustCompile(before + strings.Join(parts, ".*") + "$")
}

func (l skipList) covers(pkg, test, reason string) bool {
	for _, e := range l {
		if e.pkg.MatchString(pkg) && e.test.MatchString(test) && strings.Contains(reason, e.words) {
			return true
		}
	}
	return false
}
