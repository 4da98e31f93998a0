package podvm

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// C24: an upgrade replaces crust-oci while pods run. The program that made a pod does what is asked for the pod.
func TestC24_APodKeepsTheProgramThatMadeIt(t *testing.T) {
	pods := Pods{t.TempDir()}
	own, err := ownProgram()
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "crust-oci-0123456789ab")
	if err := os.WriteFile(other, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "crust-vm")
	if err := os.Symlink(own, link); err != nil {
		t.Fatal(err)
	}
	for id, program := range map[string]string{"other": other, "same": own, "linked": link, "gone": other + "x", "older": ""} {
		p := &Pod{ID: id, Pause: self(t), Program: program, config: []byte(`{"runtime": "crun"}`)}
		if err := pods.make(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if err := p.add("in-" + id); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{id, "in-" + id} {
			program, config, err := pods.MadeBy(name)
			if err != nil {
				t.Fatal(err)
			}
			if id != "other" {
				if program != "" || config != "" {
					t.Errorf("%s: %q, %q", name, program, config)
				}
				continue
			}
			if b, err := os.ReadFile(config); program != other || err != nil || string(b) != `{"runtime": "crun"}` {
				t.Errorf("%s: %q with %q, %v", name, program, b, err)
			}
		}
		if err := p.remove(); err != nil {
			t.Error(err)
		}
	}
	// A version that writes other records than this one makes pods, too, and its calls come to this one after a downgrade.
	p := &Pod{ID: "later", Pause: self(t), Program: other}
	if err := pods.make(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`{"id": {"of": "later"}, "memory": "much", "program": %q}`, other)
	if err := os.WriteFile(p.at("pod.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if program, _, err := pods.MadeBy("later"); err != nil || program != other {
		t.Errorf("of a later version: %q, %v", program, err)
	}
	if err := p.remove(); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"", "nobody", "../x", "--version"} {
		if program, _, err := pods.MadeBy(name); program != "" || err != nil {
			t.Errorf("%q: %q, %v", name, program, err)
		}
	}
}
