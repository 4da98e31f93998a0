package nodeconfig

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"strings"

	goyaml "go.yaml.in/yaml/v2"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/crust-csi/crust-csi/internal/plain"
)

// maxSize is the most that a ConfigMap holds.
const maxSize = 1 << 20

// Parse reads a configuration file. Anything unknown is an error, and so is what YAML or JSON would
// silently accept: keys in another case, duplicate keys, a second document, a key without a value.
func Parse(b []byte) (*Config, error) {
	c, err := parse(b)
	if err != nil {
		// The error quotes the file, in which a key may have several lines.
		return nil, errors.New(plain.Text(err.Error(), plain.Most))
	}
	return c, nil
}

func parse(b []byte) (*Config, error) {
	if len(b) > maxSize {
		return nil, fmt.Errorf("the file is larger than %d bytes", maxSize)
	}
	if err := checkDocument(b); err != nil {
		return nil, err
	}
	text, err := yaml.YAMLToJSON(b)
	if err != nil {
		return nil, plainYAML(err)
	}
	var head struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	// Before all other keys: those of another version are unknown here.
	if err := kjson.UnmarshalCaseSensitivePreserveInts(text, &head); err != nil {
		return nil, plainType(err)
	}
	if head.APIVersion != APIVersion || head.Kind != Kind {
		return nil, fmt.Errorf("it says apiVersion %q and kind %q; this csi-node knows apiVersion: %s with kind: %s",
			head.APIVersion, head.Kind, APIVersion, Kind)
	}
	c := &Config{}
	unknown, err := kjson.UnmarshalStrict(text, c)
	if err != nil {
		return nil, plainType(err)
	}
	if len(unknown) > 0 {
		return nil, plainField(unknown[0])
	}
	return c, c.check()
}

// checkDocument rejects what the conversion to JSON would hide.
func checkDocument(b []byte) error {
	d := goyaml.NewDecoder(bytes.NewReader(b))
	d.SetStrict(true) // no duplicate keys
	var tree, more any
	if err := d.Decode(&tree); errors.Is(err, io.EOF) || err == nil && tree == nil {
		return fmt.Errorf("the file is empty; it begins with apiVersion: %s and kind: %s", APIVersion, Kind)
	} else if err != nil {
		return plainYAML(err)
	}
	if err := d.Decode(&more); !errors.Is(err, io.EOF) {
		return errors.New("there is a second document (---) in the file: put everything into one")
	}
	return checkTree("", tree)
}

func checkTree(at string, v any) error {
	switch v := v.(type) {
	case nil:
		return fmt.Errorf("%s has no value: leave the key out, or give it one ([] is an empty list)", at)
	case []any:
		for i, below := range v {
			if err := checkTree(fmt.Sprintf("%s[%d]", at, i), below); err != nil {
				return err
			}
		}
	case map[any]any:
		for key, below := range v {
			name, ok := key.(string)
			if !ok {
				return fmt.Errorf("the key %v (in %s) is no text: write it in quotes", key, at)
			}
			if err := checkTree(strings.TrimPrefix(at+"."+name, "."), below); err != nil {
				return err
			}
		}
	}
	return nil
}

var (
	yamlNoise = regexp.MustCompile(`^(error converting YAML to JSON: )?yaml: (unmarshal errors:\s*)?`)
	setTwice  = regexp.MustCompile(`key "?(.*?)"? already set in map`)
)

// plainYAML puts an error of the YAML package on one line.
func plainYAML(err error) error {
	text := strings.Join(strings.Fields(yamlNoise.ReplaceAllString(err.Error(), "")), " ")
	return errors.New(setTwice.ReplaceAllString(text, `the key "$1" is there twice: leave one out`))
}

func plainType(err error) error {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return err
	}
	if wrong.Field == "" {
		return fmt.Errorf("the file is a %s, and no map; it begins with apiVersion: %s and kind: %s", wrong.Value, APIVersion, Kind)
	}
	return fmt.Errorf("%s is a %s and has to be %s", wrong.Field, wrong.Value, kindOf(wrong.Type))
}

func kindOf(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "a map"
	case reflect.Int:
		return "a whole number"
	case reflect.Float64:
		return "a number"
	}
	return "text (write it in quotes)"
}

func plainField(err error) error {
	var field kjson.FieldError
	if !errors.As(err, &field) {
		return err
	}
	path := field.FieldPath()
	parent := path[:strings.LastIndex("."+path, ".")]
	return fmt.Errorf("the key %s is not known; known there are %s", path, strings.Join(knownKeys(reflect.TypeFor[Config](), parent), ", "))
}

var index = regexp.MustCompile(`\[\d+\]`)

// knownKeys lists the keys of the struct at a path such as nodes[0].selector.
func knownKeys(t reflect.Type, path string) []string {
	for _, key := range strings.Split(index.ReplaceAllString(path, ""), ".") {
		for i := range t.NumField() {
			if name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ","); name != key {
				continue
			}
			below := t.Field(i).Type
			for below.Kind() == reflect.Pointer || below.Kind() == reflect.Slice {
				below = below.Elem()
			}
			if below.Kind() == reflect.Struct {
				t = below
				break
			}
		}
	}
	var keys []string
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		keys = append(keys, name)
	}
	return keys
}
