// Command promql analyses expressions in Prometheus' query language. It reads a JSON list of
// expressions and writes, for each of them, its selectors and the labels that it groups and joins
// by. It is a separate program so that the parser is not a dependency of Crust CSI; the tests of
// deploy/monitoring run it.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/prometheus/prometheus/promql/parser"
)

// Asked is what an expression selects.
type Asked struct {
	Error     string     `json:"error,omitempty"`
	Selectors []Selector `json:"selectors,omitempty"`
	Labels    []string   `json:"labels,omitempty"` // of by, without, on, ignoring, group_left
}

// Selector is one of its time series selectors.
type Selector struct {
	Metric string   `json:"metric"`
	Labels []string `json:"labels,omitempty"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "promql:", err)
		os.Exit(1)
	}
}

func run() error {
	var expressions []string
	if err := json.NewDecoder(os.Stdin).Decode(&expressions); err != nil {
		return err
	}
	all := make([]Asked, len(expressions))
	for i, text := range expressions {
		all[i] = asked(text)
	}
	return json.NewEncoder(os.Stdout).Encode(all)
}

func asked(text string) Asked {
	var a Asked
	e, err := parser.NewParser(parser.Options{}).ParseExpr(text)
	if err != nil {
		return Asked{Error: err.Error()}
	}
	parser.Inspect(e, func(n parser.Node, _ []parser.Node) error {
		switch n := n.(type) {
		case *parser.VectorSelector:
			s := Selector{Metric: n.Name}
			for _, m := range n.LabelMatchers {
				if m.Name != "__name__" {
					s.Labels = append(s.Labels, m.Name)
				}
			}
			a.Selectors = append(a.Selectors, s)
		case *parser.AggregateExpr:
			a.Labels = append(a.Labels, n.Grouping...)
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				a.Labels = append(append(a.Labels, n.VectorMatching.MatchingLabels...), n.VectorMatching.Include...)
			}
		}
		return nil
	})
	return a
}
