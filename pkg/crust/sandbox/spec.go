package sandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// Spec is a sandbox as it was registered. Only its backend knows how to reach it.
type Spec struct {
	ID    string
	PID   int
	reach string // a JSON object
}

// NewSpec returns a Spec. reach is a struct for json.Marshal without fields called id or pid.
func NewSpec(id string, pid int, reach any) (Spec, error) {
	b, err := json.Marshal(reach)
	if err != nil {
		return Spec{}, err
	}
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(b, &fields); err != nil {
		return Spec{}, err
	}
	if fields == nil || fields["id"] != nil || fields["pid"] != nil {
		return Spec{}, fmt.Errorf("how sandbox %s is reached: %s is no object without id and pid", id, b)
	}
	return Spec{id, pid, object(fields)}, nil
}

// object returns the same text for equal fields.
func object(fields map[string]json.RawMessage) string {
	b, err := json.Marshal(fields)
	if err != nil {
		panic(err) // they were unmarshalled before
	}
	return string(b)
}

// Reach decodes what NewSpec was given. An unknown field is an error.
func (s Spec) Reach(into any) error {
	d := json.NewDecoder(bytes.NewReader([]byte(s.reach)))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("how sandbox %s is reached: %w", s.ID, err)
	}
	return nil
}

// MarshalJSON puts the fields of reach beside id and pid.
func (s Spec) MarshalJSON() ([]byte, error) {
	fields := map[string]json.RawMessage{}
	if s.reach != "" {
		if err := json.Unmarshal([]byte(s.reach), &fields); err != nil {
			return nil, err
		}
	}
	id, err := json.Marshal(s.ID)
	if err != nil {
		return nil, err
	}
	fields["id"] = id
	if s.PID != 0 {
		fields["pid"] = json.RawMessage(strconv.Itoa(s.PID))
	}
	return json.Marshal(fields)
}

// UnmarshalJSON undoes MarshalJSON.
func (s *Spec) UnmarshalJSON(b []byte) error {
	var own struct {
		ID  string `json:"id"`
		PID int    `json:"pid"`
	}
	fields := map[string]json.RawMessage{}
	if err := errors.Join(json.Unmarshal(b, &own), json.Unmarshal(b, &fields)); err != nil {
		return err
	}
	if fields == nil { // JSON null
		fields = map[string]json.RawMessage{}
	}
	delete(fields, "id")
	delete(fields, "pid")
	*s = Spec{own.ID, own.PID, object(fields)}
	return nil
}

// kindOf returns the kind of sandbox that a registration names, empty if the server chooses it.
func kindOf(r *crustv1alpha1.RegisterSandboxRequest) string {
	m := r.ProtoReflect()
	field := m.WhichOneof(m.Descriptor().Oneofs().ByName("kind"))
	if field == nil {
		return ""
	}
	return string(field.Name())
}
