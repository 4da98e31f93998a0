package skew

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// baselines has the baseline of each directory of protocols. make protocols compares with them.
var baselines = map[string]string{
	"pkg/crust":          "pkg/crust/v1alpha1/baseline.binpb",
	"internal/inventory": "internal/inventory/baseline.binpb",
}

var (
	protoComment = regexp.MustCompile(`//.*`)
	protoNumber  = regexp.MustCompile(`\b(\w+) = (\d+)\s*[;\[]`)
)

// numbered returns the names with numbers in the text of a .proto file: fields and values of enums.
func numbered(text string) []string {
	var all []string
	for _, m := range protoNumber.FindAllStringSubmatch(protoComment.ReplaceAllString(text, ""), -1) {
		all = append(all, m[1])
	}
	slices.Sort(all)
	return all
}

// described returns them of a described file.
func described(f *descriptorpb.FileDescriptorProto) []string {
	var all []string
	enums := func(list []*descriptorpb.EnumDescriptorProto) {
		for _, e := range list {
			for _, v := range e.GetValue() {
				all = append(all, v.GetName())
			}
		}
	}
	var messages func([]*descriptorpb.DescriptorProto)
	messages = func(list []*descriptorpb.DescriptorProto) {
		for _, m := range list {
			if m.GetOptions().GetMapEntry() { // the compiler adds it
				continue
			}
			for _, field := range m.GetField() {
				all = append(all, field.GetName())
			}
			enums(m.GetEnumType())
			messages(m.GetNestedType())
		}
	}
	enums(f.GetEnumType())
	messages(f.GetMessageType())
	for _, field := range f.GetExtension() {
		all = append(all, field.GetName())
	}
	slices.Sort(all)
	return all
}

// Programs of a release call those of today, so a change of a protocol must not break the last
// release's. The baselines have all its protocols, with every field and every value.
func TestTheBaselinesAreThoseOfTheLastRelease(t *testing.T) {
	root, releases := testnode.Root(t), testnode.Releases(t)
	last := releases[len(releases)-1]
	source := filepath.Join(testnode.ReleaseDir(t, last), "source")
	files := map[string]*descriptorpb.FileDescriptorProto{}
	for dir, name := range baselines {
		b, err := os.ReadFile(filepath.Join(root, name))
		ok(t, err)
		var image descriptorpb.FileDescriptorSet
		ok(t, proto.Unmarshal(b, &image))
		for _, f := range image.GetFile() {
			files[filepath.Join(dir, f.GetName())] = f
		}
	}
	seen := 0
	for _, top := range []string{"cmd", "internal", "pkg"} {
		ok(t, filepath.WalkDir(filepath.Join(source, top), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".proto") {
				return err
			}
			seen++
			name, err := filepath.Rel(source, path)
			ok(t, err)
			f := files[name]
			if f == nil {
				t.Errorf("no baseline has %s of %s: make baseline OF=%s", name, last, last)
				return nil
			}
			text, err := os.ReadFile(path)
			ok(t, err)
			if was, is := numbered(string(text)), described(f); !slices.Equal(was, is) {
				t.Errorf("the baseline of %s is not that of %s: make baseline OF=%s\nthe release has\n%q\nthe baseline has\n%q",
					name, last, last, was, is)
			}
			return nil
		}))
	}
	if seen < 5 {
		t.Errorf("only %d .proto files were found in %s", seen, source)
	}
}
