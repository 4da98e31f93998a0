package nodeconfig

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// Selector is a LabelSelector of Kubernetes. Kubernetes' type would bring half of its API machinery
// into a program that runs as root; a test compares their matches.
type Selector struct {
	MatchLabels      map[string]string `json:"matchLabels,omitempty"`
	MatchExpressions []Expression      `json:"matchExpressions,omitempty"`
}

// Expression is a requirement on one label.
type Expression struct {
	Key      string   `json:"key"`
	Operator string   `json:"operator"`
	Values   []string `json:"values,omitempty"`
}

var operators = map[string]selection.Operator{
	"In": selection.In, "NotIn": selection.NotIn, "Exists": selection.Exists, "DoesNotExist": selection.DoesNotExist,
}

type labelSet = labels.Set

// compile makes the matcher. An empty selector, which would match every node, is refused: that is
// what the top level is for.
func (s *Selector) compile() (labels.Selector, error) {
	if s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
		return nil, errors.New("it is empty: give matchLabels or matchExpressions. Pools of all other nodes belong at the top level")
	}
	selector := labels.NewSelector()
	for key, value := range s.MatchLabels {
		r, err := labels.NewRequirement(key, selection.In, []string{value})
		if err != nil {
			return nil, fmt.Errorf("matchLabels: %w", oneLine(err))
		}
		selector = selector.Add(*r)
	}
	for i, e := range s.MatchExpressions {
		operator, ok := operators[e.Operator]
		if !ok {
			return nil, fmt.Errorf("matchExpressions[%d]: operator %q: In, NotIn, Exists or DoesNotExist", i, e.Operator)
		}
		r, err := labels.NewRequirement(e.Key, operator, slices.Clone(e.Values))
		if err != nil {
			return nil, fmt.Errorf("matchExpressions[%d]: %w", i, oneLine(err))
		}
		selector = selector.Add(*r)
	}
	return selector, nil
}

// oneLine puts an error that is a list on one line.
func oneLine(err error) error {
	return errors.New(strings.Join(strings.Fields(err.Error()), " "))
}

// keys lists the labels that it uses.
func (s *Selector) keys() []string {
	var keys []string
	for key := range s.MatchLabels {
		keys = append(keys, key)
	}
	for _, e := range s.MatchExpressions {
		keys = append(keys, e.Key)
	}
	return keys
}
