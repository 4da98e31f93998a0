package kata

import "testing"

// Whatever a guest makes Kata's shim say, statistics are an error or numbers that a volume can have.
func FuzzStats(f *testing.F) {
	f.Add([]byte(`{"usage":[{"available":1,"total":2,"used":1,"unit":1},{"total":5,"unit":2}],"volume_condition":{"abnormal":true}}`))
	f.Add([]byte(`{"usage":[{"total":18446744073709551615,"unit":1}]}`))
	f.Add([]byte(`[]`))
	f.Fuzz(func(t *testing.T, text []byte) {
		u, ailment, err := parseStats(text)
		if err != nil {
			return
		}
		for _, n := range []int64{u.TotalBytes, u.AvailableBytes, u.UsedBytes, u.TotalInodes, u.AvailableInodes, u.UsedInodes} {
			if n < 0 {
				t.Errorf("%+v", u)
			}
		}
		if len(ailment) > 4096 {
			t.Errorf("an ailment of %d bytes", len(ailment))
		}
	})
}
