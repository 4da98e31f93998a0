package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// unambiguous refuses a config.json whose mounts differ between runtimes. runc accepts a key in any
// case, and uses the last of several; crun accepts one spelling, and uses the first.
func unambiguous(b []byte) error {
	top, err := keys(b, "mounts", "annotations")
	if err != nil || top["mounts"] == nil {
		return err
	}
	var mounts []json.RawMessage
	if json.Unmarshal(top["mounts"], &mounts) != nil {
		return nil // no list: the runtimes refuse it
	}
	for _, m := range mounts {
		if _, err := keys(m, "destination", "type", "source", "options"); err != nil {
			return err
		}
	}
	return nil
}

// keys returns the values of the given names in an object; nil for anything that is not an object.
func keys(b []byte, names ...string) (map[string]json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, err
	}
	found := map[string]json.RawMessage{}
	for d.More() {
		t, err := d.Token()
		key, ok := t.(string)
		var value json.RawMessage
		if err = errors.Join(err, d.Decode(&value)); err != nil || !ok {
			return nil, err
		}
		for _, name := range names {
			if !strings.EqualFold(key, name) {
				continue
			}
			if key != name || found[name] != nil {
				return nil, fmt.Errorf("the key %q stands there twice, or in another spelling (%q), which runtimes read in different ways",
					name, key)
			}
			found[name] = value
		}
	}
	return found, nil
}
