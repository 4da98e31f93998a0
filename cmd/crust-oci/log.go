package main

import (
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"time"
)

// logTo writes an error to the file of --log. containerd reads a runtime's last error there and puts it into the pod's events.
func logTo(args []string, failure error) error {
	path, format := "", "text"
	// Only options before the command: those after it belong to the container.
	for i := 0; i < len(args) && strings.HasPrefix(args[i], "-"); i++ {
		name, value, has := strings.Cut("--"+strings.TrimLeft(args[i], "-"), "=")
		if !has && slices.Contains(withValue, name) && i+1 < len(args) {
			i++
			value = args[i]
		}
		switch name {
		case "--log":
			path = value
		case "--log-format":
			format = value
		}
	}
	if path == "" {
		return nil
	}
	line := []byte(failure.Error())
	if format == "json" {
		var err error
		if line, err = json.Marshal(map[string]string{"level": "error", "msg": "crust-oci: " + failure.Error(),
			"time": time.Now().UTC().Format(time.RFC3339)}); err != nil {
			return err
		}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}
