package kubernetes_test

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

var rowOfWatches = regexp.MustCompile(`(?m)^\| watches \(sidecars and csi-steward (\d+), crust-agent (\d+)\) \| (\d+) \| ([\d,]+) \|$`)

// watchesOfThePage returns how many watches each account of a node has, as docs/performance.md has them:
// the page and TestFleet_WhatTheAPIServerPays cannot differ. csi-steward has the account of the sidecars.
func watchesOfThePage(t *testing.T) map[string]int {
	t.Helper()
	page, err := os.ReadFile("../../docs/performance.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := rowOfWatches.FindAllStringSubmatch(string(page), -1)
	if len(rows) != 1 {
		t.Fatalf("docs/performance.md has %d rows of watches, want one", len(rows))
	}
	var n [4]int
	for i := range n {
		if n[i], err = strconv.Atoi(strings.ReplaceAll(rows[0][i+1], ",", "")); err != nil {
			t.Fatalf("docs/performance.md: %s: %v", rows[0][0], err)
		}
	}
	if n[0] == 0 || n[1] == 0 || n[0]+n[1] != n[2] || n[2]*5000 != n[3] {
		t.Fatalf("docs/performance.md: the numbers do not fit together: %s", rows[0][0])
	}
	return map[string]int{"csi-sidecars": n[0], "crust-agent": n[1]}
}

// The test that measures the watches reads its bound from the page. It runs in make test-fleet only, so
// this finds a row that it could not read.
func TestThePageHasTheWatchesOfANode(t *testing.T) {
	watchesOfThePage(t)
}
