package nodeconfig

import (
	"strings"
	"testing"
)

func TestA05_PoolFlagIsReadStrictly(t *testing.T) {
	for text, want := range map[string]Pool{
		"a=loop:/d":                            {"a", "/d", 0, 0},
		"a=loop:/d/../e=f:g":                   {"a", "/e=f:g", 0, 0},
		"a=loop:/d,overcommit=1.5,reserve=1Gi": {"a", "/d", 1.5, 1 << 30},
		"a=loop:/d,reserve=64Mi":               {"a", "/d", 0, 64 << 20},
		"a=loop:/d,reserve=2097152":            {"a", "/d", 0, 2 << 20},
	} {
		if got, err := ParsePool(text); err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for text, word := range map[string]string{
		"a=loop:d":                              "absolute",
		"a=dir:/d":                              "NAME=loop:DIR",
		"a=loop:,overcommit=2":                  "absolute",
		"A=loop:/d":                             "lower-case",
		"a=loop:/d,e":                           "comma",
		"a=loop:/d,overcomit=2":                 "overcomit",
		"a=loop:/d,overcommit=0.5":              "from 1",
		"a=loop:/d,overcommit=NaN":              "from 1",
		"a=loop:/d,overcommit=Inf":              "from 1",
		"a=loop:/d,overcommit=":                 "from 1",
		"a=loop:/d,overcommit=2,overcommit=3":   "twice",
		"a=loop:/d,reserve=64M":                 "64Mi",
		"a=loop:/d,reserve=-1Mi":                "64Mi",
		"a=loop:/d,reserve=1":                   "64Mi",
		"a=loop:/d,reserve=99999999999999999Gi": "64Mi",
		"a=loop:/d,":                            "no option",
	} {
		if got, err := ParsePool(text); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
}
