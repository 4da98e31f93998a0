package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
)

// bundle is a config.json as the runtimes read it, without knowledge of crust-oci.
type bundle struct {
	Mounts []struct {
		Destination, Type, Source string
		Options                   []string
	}
	Annotations map[string]string
}

func read(t *testing.T, path string) (doc any, typed bundle, err error) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&doc); err != nil {
		return nil, bundle{}, err
	}
	err = json.NewDecoder(bytes.NewReader(b)).Decode(&typed)
	return doc, typed, err
}

// Every bind mount that the real runtime will make is examined, and only the sources in config.json
// change.
func FuzzConfig(f *testing.F) {
	for _, s := range []string{
		`{"ociVersion": "1.2.0", "mounts": [{"destination": "/data", "type": "bind", "source": "/v", "options": ["rbind", "rprivate"]}, {"destination": "/proc", "type": "proc", "source": "proc"}], "annotations": {"io.kubernetes.cri.sandbox-id": "a", "big": "<&>"}, "linux": {"n": 18446744073709551615}}`,
		`{"mounts": [{"source": "relative", "options": ["bind"]}, null, {"source": "", "type": "bind"}, {"source": "/b", "type": "none", "options": ["ro", "rbind"]}]}`,
		`{"mounts": [{"source": "/seen", "type": "bind"}], "Mounts": [{"source": "/unseen", "type": "bind"}]}`,
		`{"Mounts": [{"source": "/unseen", "type": "bind"}]}`,
		`{"mounts": [{"Source": "/unseen", "type": "bind"}]}`,
		`{"mounts": [{"source": "/seen", "type": "bind", "` + "\u017fource" + `": "/unseen"}]}`,
		`{"mounts": [{"source": "/seen", "type": "bind", "TYPE": "proc"}]}`,
		`{"mounts": [{"source": "/unseen", "type": "bind"}], "mounts": []}`,
		`{"mounts": [{"source": "/v", "type": "proc", "OPTIONS": ["bind"]}]}`,
		`{"mounts": "none"}`, `null`, `[]`, `{"mounts": [{"source": "/v", "type": "bind"}]} {}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		path := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := readSpec(path)
		if err != nil {
			return
		}
		doc, typed, err := read(t, path)
		if err != nil {
			return // the runtime refuses it
		}
		var want []string
		for _, m := range typed.Mounts {
			if m.Source == "" || m.Type != "bind" && !slices.Contains(m.Options, "bind") && !slices.Contains(m.Options, "rbind") {
				continue
			}
			if !filepath.IsAbs(m.Source) {
				m.Source = filepath.Join(filepath.Dir(path), m.Source)
			}
			want = append(want, m.Source)
		}
		var got []string
		changed, err := s.binds(func(_ map[string]any, source string) (string, error) {
			got = append(got, source)
			return "/sandbox" + source, nil
		})
		if err != nil || !slices.Equal(got, want) || changed != (len(want) > 0) {
			t.Fatalf("the runtime will bind %q, and %q were looked at (%v, %v)", want, got, changed, err)
		}
		asTyped := spec{doc: map[string]any{"annotations": map[string]any{}}}
		for k, v := range typed.Annotations {
			asTyped.doc["annotations"].(map[string]any)[k] = v
		}
		id, isSandbox, err := s.sandbox()
		if id2, isSandbox2, err2 := asTyped.sandbox(); id != id2 || isSandbox != isSandbox2 || (err == nil) != (err2 == nil) {
			t.Errorf("sandbox %q %v %v, by the annotations %q %v %v", id, isSandbox, err, id2, isSandbox2, err2)
		}
		if !changed {
			return
		}
		if err := s.write(); err != nil {
			t.Fatal(err)
		}
		now, typedNow, err := read(t, path)
		if err != nil {
			t.Fatalf("what was written cannot be read: %v", err)
		}
		for i, j := 0, 0; i < len(typedNow.Mounts); i++ {
			if m := typedNow.Mounts[i]; j < len(want) && m.Source == "/sandbox"+want[j] {
				j++
			} else if m.Source != typed.Mounts[i].Source {
				t.Errorf("mount %d is of %q now, was of %q", i, m.Source, typed.Mounts[i].Source)
			}
			if i == len(typedNow.Mounts)-1 && j != len(want) {
				t.Errorf("%d of %d sources were changed", j, len(want))
			}
		}
		for _, d := range []any{doc, now} {
			list, _ := d.(map[string]any)["mounts"].([]any)
			for _, m := range list {
				if m, ok := m.(map[string]any); ok {
					delete(m, "source")
				}
			}
		}
		if !reflect.DeepEqual(doc, now) {
			t.Errorf("%v became %v", doc, now)
		}
	})
}
