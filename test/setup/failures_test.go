package setup

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// CI prints what failed tests said, and not what hundreds of others did.
func TestFleet_WhatFailedIsShown(t *testing.T) {
	for name, c := range map[string]struct{ said, want string }{
		"beside others": {`=== RUN   TestGood
noise of a process
--- PASS: TestGood (0.00s)
=== RUN   TestBad
    bad_test.go:1: before
=== RUN   TestBad/good
    good_test.go:1: of a part
=== RUN   TestLater
    later_test.go:1: noise
--- PASS: TestLater (0.00s)
=== NAME  TestBad
    bad_test.go:2: after
--- FAIL: TestBad (1.00s)
    --- PASS: TestBad/good (0.00s)
FAIL
FAIL	example.com/bad	1.000s
=== RUN   TestGood
    good_test.go:2: noise of another package
--- PASS: TestGood (0.00s)
PASS
ok  	example.com/good	1.000s
FAIL
make: *** [Makefile:1: test] Error 1
`, `    bad_test.go:1: before
    bad_test.go:2: after
--- FAIL: TestBad (1.00s)
FAIL
FAIL	example.com/bad	1.000s
FAIL
make: *** [Makefile:1: test] Error 1
`},
		"without -v": {`ok  	example.com/good	1.000s
--- FAIL: TestBad (1.00s)
    bad_test.go:1: why
FAIL
FAIL	example.com/bad	1.000s
`, `--- FAIL: TestBad (1.00s)
    bad_test.go:1: why
FAIL
FAIL	example.com/bad	1.000s
`},
		"a crash": {`=== RUN   TestCrash
before
panic: test timed out after 1m0s
goroutine 1 [running]:
FAIL	example.com/crash	1.000s
=== RUN   TestGood
noise
--- PASS: TestGood (0.00s)
`, `panic: test timed out after 1m0s
goroutine 1 [running]:
FAIL	example.com/crash	1.000s
`},
		"no test": {"# example.com/a\na.go:1:1: undefined: a\nFAIL	example.com/a [build failed]\n",
			"# example.com/a\na.go:1:1: undefined: a\nFAIL	example.com/a [build failed]\n"},
	} {
		file := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(file, []byte(c.said), 0o644); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("awk", "-f", "../../scripts/failures.awk", file, file).CombinedOutput()
		if err != nil || string(out) != c.want {
			t.Errorf("%s: %v\n%s\nand not\n%s", name, err, out, c.want)
		}
	}
}
