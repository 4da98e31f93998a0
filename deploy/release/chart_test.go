package main

import (
	"slices"
	"strings"
	"testing"
)

func putChart(t *testing.T, r release, version, app string) {
	dir := r.project + "/deploy/helm/crust-csi/"
	put(t, dir+"Chart.yaml", "name: crust-csi\nversion: "+version+"\nappVersion: \""+app+"\"\n")
	put(t, dir+"templates/x.yaml", "tag: dev\n")
	values := "sidecar:\n  image:\n    repository: registry.example/csi\n    tag: dev\n"
	for _, image := range slices.Concat(images, notReleased) {
		values += "a:\n  image:\n    repository: localhost/crust-csi/" + image + "\n    # A tag.\n    tag: dev\n"
	}
	put(t, dir+"values.yaml", values)
}

func TestTheChartNamesTheReleasesImages(t *testing.T) {
	r := made(t)
	for _, version := range []string{"9.8.7", "9.8.7-dev"} {
		r.version = version
		putChart(t, r, "9.8.7-dev", "9.8.7-dev")
		ok(t, r.chart())
		files := unpack(t, r.out+"/crust-csi-"+version+".tgz")
		values := files["crust-csi/values.yaml"]
		tags := strings.Count(values, "tag: v"+version+"\n")
		if len(files) != 3 || tags != len(images)+len(notReleased) || strings.Count(values, "tag: dev\n") != 1 ||
			files["crust-csi/templates/x.yaml"] != "tag: dev\n" {
			t.Errorf("%s: %q", version, files)
		}
		want := "name: crust-csi\nversion: " + version + "\nappVersion: \"" + version + "\"\n"
		if got := files["crust-csi/Chart.yaml"]; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestAChartThatIsNotTheReleasesIsRefused(t *testing.T) {
	for name, change := range map[string]func(r release){
		"version":    func(r release) { putChart(t, r, "9.8.6-dev", "9.8.7-dev") },
		"appVersion": func(r release) { putChart(t, r, "9.8.7-dev", "9.8.6-dev") },
		"no dev":     func(r release) { putChart(t, r, "9.8.7", "9.8.7") },
		"no tags":    func(r release) { put(t, r.project+"/deploy/helm/crust-csi/values.yaml", "") },
		"ignored":    func(r release) { put(t, r.project+"/deploy/helm/crust-csi/.helmignore", "") },
	} {
		r := made(t)
		putChart(t, r, "9.8.7-dev", "9.8.7-dev")
		change(r)
		if r.chart() == nil {
			t.Errorf("%s: it was packed", name)
		}
	}
}
