# Of the output of `go test -v`: what failed tests say, and what is of no test. Its two arguments are the same file.
# Usage: awk -f scripts/failures.awk FILE FILE
NR == FNR {
	if ($1 == "---" && $2 == "FAIL:") failed[$3]
	next
}
/^=== (RUN|CONT|NAME|PAUSE) / {
	test = $3
	ends = 0
	next
}
# A package ends. A crash or a timeout is of the whole of it.
/^(ok|FAIL|\?)[ \t]/ || /^(PASS|FAIL)$/ { test = ends = "" }
/^--- FAIL: / { test = "" }
/^(panic|fatal error|unexpected fault address|SIGQUIT):/ { ends = 1 }
/^ *--- (PASS|SKIP): / || /^(ok|\?)[ \t]/ || /^PASS$/ { next }
test == "" || ends || test in failed { print }
