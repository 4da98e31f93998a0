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

// Spec is a sandbox as it was registered. How it is reached only its backend knows.
type Spec struct {
	ID    string
	PID   int
	reach string // a JSON object
}

// NewSpec makes a Spec. Reach is a struct that json.Marshal takes, of which no field is called id or pid.
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

// object is the same text for the same fields.
func object(fields map[string]json.RawMessage) string {
	b, err := json.Marshal(fields)
	if err != nil {
		panic(err) // of what was unmarshalled before
	}
	return string(b)
}

// Reach gives back what NewSpec was given. A field that is unknown is an error.
func (s Spec) Reach(into any) error {
	d := json.NewDecoder(bytes.NewReader([]byte(s.reach)))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("how sandbox %s is reached: %w", s.ID, err)
	}
	return nil
}

// MarshalJSON puts the fields of Reach beside id and pid.
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
	if fields == nil { // of a null
		fields = map[string]json.RawMessage{}
	}
	delete(fields, "id")
	delete(fields, "pid")
	*s = Spec{own.ID, own.PID, object(fields)}
	return nil
}

// kindOf is the kind of sandbox that a registration names, empty where it leaves that to the server.
func kindOf(r *crustv1alpha1.RegisterSandboxRequest) string {
	m := r.ProtoReflect()
	field := m.WhichOneof(m.Descriptor().Oneofs().ByName("kind"))
	if field == nil {
		return ""
	}
	return string(field.Name())
}
