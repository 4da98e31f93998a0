package nodeconfig

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// files is a configuration and labels, in a directory that is replaced through a link as the
// kubelet does it.
type files struct {
	t    *testing.T
	dir  string
	next int
}

func newFiles(t *testing.T, config, labels string) (*files, Source) {
	t.Helper()
	f := &files{t: t, dir: t.TempDir()}
	for _, name := range []string{"config.yaml", "labels"} {
		if err := os.Symlink("..data/"+name, filepath.Join(f.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	f.swap(config, labels)
	return f, Source{File: filepath.Join(f.dir, "config.yaml"), LabelsFile: filepath.Join(f.dir, "labels"), Flags: Flags{Verbosity: 2}}
}

func (f *files) swap(config, labels string) {
	f.t.Helper()
	f.next++
	data := filepath.Join(f.dir, "..data"+string(rune('a'+f.next)))
	for _, err := range []error{
		os.Mkdir(data, 0o700), os.WriteFile(filepath.Join(data, "config.yaml"), []byte(config), 0o600),
		os.WriteFile(filepath.Join(data, "labels"), []byte(labels), 0o600), os.Symlink(filepath.Base(data), data+".link"),
		os.Rename(data+".link", filepath.Join(f.dir, "..data")),
	} {
		if err != nil {
			f.t.Fatal(err)
		}
	}
}

// watched is a configuration under Watch, and the observed effects.
type watched struct {
	*Live
	t     *testing.T
	asked chan os.Signal

	mu        sync.Mutex
	devices   []string
	told      int
	verbosity int
	text      bytes.Buffer
}

func (w *watched) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.Write(b)
}

func watch(t *testing.T, s Source, every time.Duration) *watched {
	t.Helper()
	l, err := Open(s)
	if err != nil {
		t.Fatal(err)
	}
	w := &watched{Live: l, t: t, asked: make(chan os.Signal, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.Watch(ctx, Changes{
			AllowDevices: func(list []string) error {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.devices, w.told = list, w.told+1
				return nil
			},
			Verbosity: func(v int) { w.mu.Lock(); defer w.mu.Unlock(); w.verbosity = v },
			Log:       slog.New(slog.NewTextHandler(w, nil)),
		}, w.asked, every)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

// until waits for words in the log, and returns the log since the last call.
func (w *watched) until(words string) string {
	w.t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		w.mu.Lock()
		text := w.text.String()
		if strings.Contains(text, words) && strings.HasSuffix(text, "\n") {
			w.text.Reset()
			w.mu.Unlock()
			return text
		}
		w.mu.Unlock()
		if time.Now().After(end) {
			w.t.Fatalf("no %q in:\n%s", words, text)
		}
	}
}

func (w *watched) want(usable, restart bool, verbosity int, devices ...string) {
	w.t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		w.mu.Lock()
		u, r := w.State()
		good := u == usable && r == restart && w.verbosity == verbosity && slices.Equal(w.devices, devices)
		got := []any{u, r, w.verbosity, w.devices}
		w.mu.Unlock()
		if good {
			return
		}
		if time.Now().After(end) {
			w.t.Fatalf("usable, restart, verbosity, devices: %v; want %v %v %v %v", got, usable, restart, verbosity, devices)
		}
	}
}

const (
	first  = head + "pools: [{name: a, path: /a}]\nallowDevices: [/dev/a]\n"
	second = head + "pools: [{name: a, path: /a}]\nallowDevices: [/dev/b]\nlogging: {verbosity: 4}\n"
	none   = "kubernetes.io/hostname=\"n\"\n"
)

func TestWhatIsSafeIsTakenOver(t *testing.T) {
	f, s := newFiles(t, first, none)
	w := watch(t, s, 5*time.Millisecond)
	f.swap(second, none)
	w.until("read again")
	w.want(true, false, 4, "/dev/b")
	f.swap(head+"pools: [{name: a, path: /a}]", none) // no devices any more, and the flag's verbosity
	w.until("read again")
	w.want(true, false, 2)
	f.swap(first, none)
	w.until("read again")
	w.want(true, false, 2, "/dev/a")
	f.swap(head+"allowDevices: []\npools: []", none) // the last device is taken away, and no pool is left
	w.until("read again")
	w.want(true, true, 2)
}

func TestPoolsWaitForARestart(t *testing.T) {
	f, s := newFiles(t, first, none)
	w := watch(t, s, 5*time.Millisecond)
	for _, pools := range []string{
		"[]", "[{name: a, path: /a}, {name: b, path: /b}]", "[{name: a, path: /b}]", "[{name: a, path: /a, overcommit: 2}]",
	} {
		f.swap(head+"allowDevices: [/dev/c]\npools: "+pools, none)
		text := w.until("restart csi-node")
		w.want(true, true, 2, "/dev/c")
		if !strings.Contains(text, "level=WARN") || !strings.Contains(text, "a=loop:/a") {
			t.Error(text)
		}
	}
	f.swap(second, none) // back
	if text := w.until("read again"); strings.Contains(text, "restart csi-node") {
		t.Error(text)
	}
	w.want(true, false, 4, "/dev/b")
}

func TestABrokenFileLeavesTheConfigurationAsItWas(t *testing.T) {
	f, s := newFiles(t, first, none)
	w := watch(t, s, 5*time.Millisecond)
	f.swap(second, none)
	w.until("read again")
	w.want(true, false, 4, "/dev/b")
	for _, broken := range []string{
		head + "allowDevice: [/dev/x]", head + "allowDevices: [x]", "", head + "logging: {verbosity: 1}", first[:40],
	} {
		f.swap(broken, none)
		if text := w.until("cannot be used"); strings.Count(text, "\n") != 1 || !strings.Contains(text, "level=ERROR") {
			t.Error(text)
		}
		w.want(false, false, 4, "/dev/b")
	}
	if err := os.Remove(filepath.Join(f.dir, "..data")); err != nil {
		t.Fatal(err)
	}
	w.until("no such file")
	time.Sleep(50 * time.Millisecond) // many looks
	if w.mu.Lock(); w.text.Len() > 0 {
		t.Errorf("what has not changed is said again: %s", w.text.String())
	}
	w.mu.Unlock()
	f.swap(second, none)
	w.until("read again")
	w.want(true, false, 4, "/dev/b")
}

// To open a FIFO waits for who writes to it, and csi-node's end would wait with it.
func TestAFileThatIsReplacedByAFIFOIsNotWaitedFor(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	const config = head + "nodes: [{name: a, selector: {matchLabels: {kubernetes.io/hostname: 'n'}}, pools: [{name: a, path: /a}]}]"
	for _, name := range []string{"config.yaml", "labels"} {
		f, s := newFiles(t, config, none)
		w := watch(t, s, time.Hour)
		t.Cleanup(func() { // before the end of Watch: it may wait
			if writer, err := os.OpenFile(fifo, os.O_RDWR, 0); err == nil {
				_ = writer.Close()
			}
		})
		file := filepath.Join(f.dir, name)
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(fifo, file); err != nil {
			t.Fatal(err)
		}
		w.asked <- os.Interrupt
		w.until(file + " is no regular file")
	}
}

// A changed label may give the node other devices, and other pools after a restart.
func TestLabelsThatChange(t *testing.T) {
	f, s := newFiles(t, whole, "zone=\"c\"\n")
	w := watch(t, s, 5*time.Millisecond)
	f.swap(whole, "zone=\"b\"\n")
	if text := w.until("restart csi-node"); !strings.Contains(text, "entry=diskless") {
		t.Error(text)
	}
	w.want(true, true, 4, "/dev/mapper/*")
	f.swap(whole, "")
	w.until("no labels")
	w.want(false, true, 4, "/dev/mapper/*")
}

// SIGHUP makes it read the files at once, changed or not.
func TestWhoAsksIsAnswered(t *testing.T) {
	f, s := newFiles(t, first, none)
	w := watch(t, s, time.Hour)
	f.swap(second, none)
	w.asked <- os.Interrupt
	w.until("read again")
	w.want(true, false, 4, "/dev/b")
	w.asked <- os.Interrupt
	w.until("read again")
	if w.mu.Lock(); w.told != 1 {
		t.Errorf("the same devices were given %d times", w.told)
	}
	w.mu.Unlock()
}

func TestFlagsAndFile(t *testing.T) {
	flagPool, filePool := Pool{Name: "f", Dir: "/f"}, Pool{Name: "a", Dir: "/a"}
	full := Flags{Pools: []Pool{flagPool}, AllowDevices: []string{"/dev/f"}, Verbosity: 5, VerbosityGiven: true}
	for text, c := range map[string]struct {
		flags Flags
		want  Settings
		err   string
	}{
		head: {full, Settings{"", []Pool{flagPool}, []string{"/dev/f"}, 5}, ""},
		head + "pools: [{name: a, path: /a}]\nlogging: {verbosity: 0}": {
			Flags{AllowDevices: full.AllowDevices, Verbosity: 2}, Settings{"", []Pool{filePool}, []string{"/dev/f"}, 0}, ""},
		head + "pools: []": {full, Settings{}, "it says pools, and the command line --pool: leave one of them out"},
		head + "nodes: [{name: x, selector: {matchLabels: {a: b}}, pools: []}]": {full, Settings{}, "--pool"},
		head + "allowDevices: []": {full, Settings{}, "--allow-device"},
		head + "nodes: [{name: x, selector: {matchLabels: {a: b}}, allowDevices: [/dev/y]}]": {full, Settings{}, "--allow-device"},
		head + "logging: {verbosity: 5}": {full, Settings{}, "-v"},
		head + "#":                       {Flags{}, Settings{}, "at least one"},
		head + "pools: [] ":              {Flags{}, Settings{Pools: []Pool{}}, ""}, // decided, for a node of shares only
		head + "nodes: [{name: x, selector: {matchLabels: {a: b}}, pools: [{name: a, path: /a}]}]\npools: []": {
			Flags{}, Settings{Pools: []Pool{}}, ""},
	} {
		_, s := newFiles(t, text, none)
		s.Flags = c.flags
		got, err := s.Load()
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	if got, err := (Source{Flags: full}).Load(); err != nil || got.Verbosity != 5 || len(got.Pools) != 1 {
		t.Errorf("without a file: %+v, %v", got, err)
	}
	twice := Flags{Pools: []Pool{flagPool, flagPool}}
	if _, err := (Source{Flags: twice}).Load(); err == nil || !strings.Contains(err.Error(), "twice") {
		t.Errorf("%v", err)
	}
}

// An error that ends the process at its start names the file.
func TestFilesThatCannotBeUsedAtTheStart(t *testing.T) {
	_, s := newFiles(t, whole, "zone")
	if _, err := Open(s); err == nil || !strings.Contains(err.Error(), "--node-labels "+s.LabelsFile+": line 1") {
		t.Errorf("%v", err)
	}
	without := s
	without.LabelsFile = ""
	_, err := Open(without)
	if err == nil || !strings.Contains(err.Error(), "--config "+s.File) || !strings.Contains(err.Error(), "give --node-labels") {
		t.Errorf("%v", err)
	}
	for _, missing := range []Source{{File: s.File + "x"}, {File: s.File, LabelsFile: s.LabelsFile + "x"}} {
		if _, err := Open(missing); err == nil || !strings.Contains(err.Error(), "no such file") {
			t.Errorf("%v", err)
		}
	}
	_, s = newFiles(t, head+"pool: []", none)
	if _, err := Open(s); err == nil || !strings.HasPrefix(err.Error(), "--config "+s.File+": the key pool") {
		t.Errorf("%v", err)
	}
	_, s = newFiles(t, head+"nodes: [{name: a, selector: {matchLabels: {a: b}}, pools: []}]", none)
	if _, err := Open(s); err == nil || !strings.HasPrefix(err.Error(), "--config "+s.File+": no entry") {
		t.Errorf("%v", err)
	}
}

func TestTheCheckTellsWhatANodeWouldHave(t *testing.T) {
	_, s := newFiles(t, whole, "example.com/disk=\"nvme\"\n")
	want := "# entry \"nvme\" of nodes\n--pool=fast=loop:/mnt/nvme/crust-csi,overcommit=1.5,reserve=1073741824\n" +
		"--pool=default=loop:/var/lib/crust-csi/pool\n--allow-device=/dev/disk/by-id/a-*\n-v=4\n"
	if got, err := s.Describe(); err != nil || got != want {
		t.Errorf("%s, %v", got, err)
	}
	s.LabelsFile = ""
	if got, err := s.Describe(); err != nil || !strings.Contains(got, "can be used") {
		t.Errorf("%s, %v", got, err)
	}
	_, s = newFiles(t, whole+"\nx: 1", none)
	s.LabelsFile = ""
	if got, err := s.Describe(); err == nil {
		t.Error(got)
	}
}
