package nodeconfig

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// The page documents every key, and its example is a valid file.
func TestThePageOfTheConfigurationFile(t *testing.T) {
	page, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindAllSubmatch(page, -1)
	if len(blocks) != 1 {
		t.Fatalf("%d examples", len(blocks))
	}
	c := mustParse(t, string(blocks[0][1]))
	for disk, entry := range map[string]string{"nvme": "nvme", "san": "diskless", "hdd": ""} {
		if s, err := c.choose(map[string]string{"example.com/disk": disk}); err != nil || s.Entry != entry {
			t.Errorf("%s: %+v, %v", disk, s, err)
		}
	}
	for _, of := range []any{Config{}, Logging{}, PoolItem{}, NodeItem{}, Selector{}} {
		for _, key := range knownKeys(reflect.TypeOf(of), "") {
			if !regexp.MustCompile("`([a-z.]+\\.)?" + key + "[`.]").Match(page) {
				t.Errorf("docs/configuration.md has no `%s`", key)
			}
		}
	}
	for operator := range operators {
		if !strings.Contains(string(page), "`"+operator+"`") {
			t.Errorf("docs/configuration.md has no operator %s", operator)
		}
	}
}
