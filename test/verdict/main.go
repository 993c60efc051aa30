// Command verdict reads what "go test -json" prints and says in a form for people
// what passed, what failed with its output, and what was skipped and why. A skip
// that no line of the list of expected skips covers is a failure.
//
//	go test -json ./... | verdict -expected-skips test/expected-skips -expected-skips test/expected-skips-kernel
//
// The last line is "N passed, N failed, N skipped". Tests without subtests count,
// and packages that fail outside of any test.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run returns the exit status: 0 for a pass, 1 for a fail, 2 for wrong use.
func run(args []string, in io.Reader, out, errOut io.Writer) int {
	flags := flag.NewFlagSet("verdict", flag.ContinueOnError)
	flags.SetOutput(errOut)
	var expected skipList
	flags.Func("expected-skips", "`file` with the skips that are no failure; may be given several times", func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		list, err := readSkipList(f)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		expected = append(expected, list...)
		return nil
	})
	title := flags.String("title", "tests", "`words` for the verdict line")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	w := bufio.NewWriter(out)
	defer w.Flush()
	tally := newTally(w)
	if err := tally.read(in); err != nil {
		w.Flush()
		fmt.Fprintln(errOut, "verdict: reading test events:", err)
		return 2
	}
	if !tally.report(*title, expected) {
		return 1
	}
	return 0
}
