package kubernetes_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	csidriver "github.com/crust-csi/crust-csi/pkg/driver"
)

// The schema of the Helm chart's values has the parameters of classes that the driver has,
// with values that it takes. The chart's own tests are a module that cannot ask it.
func TestTheChartsParametersAreTheDrivers(t *testing.T) {
	b, err := os.ReadFile("../helm/crust-csi/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	type object struct {
		Enum       []any
		Properties map[string]*object
	}
	var schema struct{ Definitions map[string]*object }
	if err := json.Unmarshal(b, &schema); err != nil {
		t.Fatal(err)
	}
	parameters := schema.Definitions["storageClass"].Properties["parameters"].Properties
	_, err = csidriver.ParseParameters(map[string]string{"x": ""})
	_, known, ok := strings.Cut(err.Error(), "known are ")
	if !ok {
		t.Fatal(err)
	}
	drivers := strings.Split(known, ", ")
	for _, name := range drivers {
		p := parameters[name]
		if p == nil {
			t.Errorf("%s is not in the schema", name)
			continue
		}
		for _, v := range p.Enum {
			s, isText := v.(string)
			if !isText {
				continue // true and false, which the chart writes as strings
			}
			if _, err := csidriver.ParseParameters(map[string]string{name: s}); err != nil {
				t.Error(err)
			}
		}
		if len(p.Enum) == 0 && name != "pool" {
			t.Errorf("%s takes anything", name)
		}
	}
	if len(parameters) != len(drivers)+1 { // and csi.storage.k8s.io/fstype
		t.Errorf("the schema has %d parameters, the driver %v", len(parameters), drivers)
	}
}
