package kata

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"

	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// socket is the path of a shim's management socket, on which it speaks HTTP.
type socket string

func (b *Backend) socket(id string) socket {
	return socket(filepath.Join(b.Sandboxes, id, "shim-monitor.sock"))
}

// mostAnswer bounds an answer, in bytes: a guest takes part in it.
const mostAnswer = 64 << 10

func (s socket) call(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, MaxResponseHeaderBytes: mostAnswer,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", string(s))
		},
	}}
	where := url.URL{Scheme: "http", Host: "shim", Path: path, RawQuery: query.Encode()}
	r, err := http.NewRequestWithContext(ctx, method, where.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	answer, err := client.Do(r)
	if err != nil {
		return nil, fault.New(fault.Unavailable, "Kata's shim does not answer at %s: %w", string(s), err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, mostAnswer))
	if err != nil {
		return nil, fault.New(fault.Unavailable, "Kata's shim at %s: %w", string(s), err)
	}
	if answer.StatusCode != http.StatusOK {
		return nil, fault.New(fault.State, "Kata's shim refused %s: %s", path, plain.Text(string(text), plain.Most))
	}
	return text, nil
}

// volumeStats is VolumeStatsResponse of Kata's agent, as the shim writes it.
type volumeStats struct {
	Usage []struct {
		Available uint64 `json:"available"`
		Total     uint64 `json:"total"`
		Used      uint64 `json:"used"`
		Unit      int    `json:"unit"`
	} `json:"usage"`
	Condition struct {
		Abnormal bool   `json:"abnormal"`
		Message  string `json:"message"`
	} `json:"volume_condition"`
}

// stats asks for the usage of a volume. The shim knows it by its device.
func (s socket) stats(ctx context.Context, device string) (mounter.Usage, string, error) {
	text, err := s.call(ctx, http.MethodGet, "/direct-volume/stats", url.Values{"path": {url.PathEscape(device)}}, nil)
	if err != nil {
		return mounter.Usage{}, "", err
	}
	return parseStats(text)
}

func parseStats(text []byte) (u mounter.Usage, ailment string, err error) {
	const bytesUnit, inodesUnit = 1, 2
	var r volumeStats
	if err := json.Unmarshal(text, &r); err != nil {
		return u, "", fault.New(fault.State, "Kata's statistics cannot be read: %s", plain.Text(err.Error(), plain.Most))
	}
	for _, a := range r.Usage {
		if most := uint64(1) << 62; a.Total > most || a.Available > most || a.Used > most {
			return mounter.Usage{}, "", fault.New(fault.State, "Kata's statistics have a number that no volume has")
		}
		switch a.Unit {
		case bytesUnit:
			u.TotalBytes, u.AvailableBytes, u.UsedBytes = int64(a.Total), int64(a.Available), int64(a.Used)
		case inodesUnit:
			u.TotalInodes, u.AvailableInodes, u.UsedInodes = int64(a.Total), int64(a.Available), int64(a.Used)
		}
	}
	if u.TotalBytes == 0 {
		return mounter.Usage{}, "", fault.New(fault.State, "Kata's statistics have no size")
	}
	if r.Condition.Abnormal {
		ailment = plain.Text(r.Condition.Message, plain.Most)
		if ailment == "" {
			ailment = "Kata's agent says that the volume is not well"
		}
	}
	return u, ailment, nil
}

// resize asks for growth to a size in bytes.
func (s socket) resize(ctx context.Context, device string, size int64) error {
	body, err := json.Marshal(map[string]any{"VolumePath": device, "Size": size})
	if err != nil {
		return err
	}
	if _, err := s.call(ctx, http.MethodPost, "/direct-volume/resize", nil, body); err != nil {
		return fmt.Errorf("growing to %d bytes: %w", size, err)
	}
	return nil
}
