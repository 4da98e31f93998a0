# make demo   shows the main job on this machine, no cluster needed
# make test   all tests that need nothing but root on this machine
SHELL := /bin/bash
GO ?= go
VERSION ?= $(shell cat internal/version/VERSION)-dev
LDFLAGS := -X github.com/crust-csi/crust-csi/internal/version.number=$(VERSION)
LINT := .cache/bin/golangci-lint
HELM := .cache/bin/helm
FUZZTIME ?= 10s
FILES ?= 1000000
# How long the tests of one package may take. The default of go test is ten minutes.
TIMEOUT ?= 60m
# Packages whose tests take longest. go test begins with what is named first; ./... adds the others.
LONG = ./test/crust ./test/node ./test/skew ./test/storm ./test/monitoring ./sanity ./test/adversary ./test/byhand
# MiB for temporary files: the demo's, the tests'.
ROOM = 1024
# One way to compile, that of the images: other flags would compile each package once more. go vet is part of make lint;
# go test would run it again, on all dependencies. Without DWARF (-w), linking takes two thirds of the time.
export CGO_ENABLED ?= 0
export GOFLAGS ?= -trimpath -vet=off -ldflags=-w

.PHONY: all build setup demo test sanity fuzz lint clean

all: build

build:
	$(GO) build -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

# What the tests and the demo need of Debian: file system programs.
setup:
	scripts/room.sh $(ROOM)
	scripts/setup.sh

demo: setup build
	scripts/demo.sh

test: ROOM = 8192
# All packages share the programs that their tests build: internal/testnode/build.go.
test: setup pod-guest monitoring releases
	builds=$$(mktemp -d) && trap 'rm -rf "$$builds"' EXIT && CRUST_TEST_BUILDS=$$builds \
		$(GO) test -p 4 -exec $(CURDIR)/scripts/own-mounts.sh -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) $(LONG) ./...
	$(GO) test -C deploy/helm -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) ./...
	$(GO) test -C examples/minimal-driver -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) ./...

# csi-test's whole suite, once for each access type.
sanity: setup
	CRUST_SANITY_ACCESS=mount $(GO) test -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) ./sanity
	CRUST_SANITY_ACCESS=block $(GO) test -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) ./sanity

fuzz:
	scripts/fuzz.sh $(FUZZTIME)

$(LINT): tools/go.mod
	$(GO) build -modfile=tools/go.mod -o $@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

lint: $(LINT)
	test -z "$$(gofmt -l cmd internal pkg sanity deploy test examples)"
	$(LINT) run --allow-parallel-runners --build-tags vm,kubernetes,fleet,fixtures,bench ./...
	$(LINT) run --allow-parallel-runners --build-tags man ./cmd/...
	cd deploy/helm && $(CURDIR)/$(LINT) run --allow-parallel-runners ./...
	cd examples/minimal-driver && $(CURDIR)/$(LINT) run --allow-parallel-runners ./...

# After each edit: lint, and the tests of one package each that start no guest. What has not changed since is not tested again.
.PHONY: check
check: lint
	$(GO) test -timeout $(TIMEOUT) $(TESTFLAGS) $$($(GO) list ./cmd/... ./internal/... ./pkg/... ./test/documents ./test/mutants | \
		grep -vE '/internal/(microvm|testnode)$$')

# Breaks the code on purpose, one line at a time, and looks whether the tests
# notice: all of test/mutants/list, or those of what changed since BASE and some others.
.PHONY: mutants mutants-changed
BASE ?= $(shell git rev-parse -q --verify HEAD~1 || echo HEAD)
OTHERS ?= 20
mutants: setup pod-guest monitoring releases
	$(GO) run ./test/mutants $(MUTANTFLAGS)

mutants-changed: setup pod-guest monitoring releases
	$(GO) run ./test/mutants -changed $(BASE) -others $(OTHERS) $(MUTANTFLAGS)

# The tests that depend on the kernel, as root in microVMs with Linux 6.1 and
# 6.12 and a loaded SELinux policy: all of them, or those that a kernel can break.
KERNELS ?= 6.1,6.12
.PHONY: test-vm test-vm-short
test-vm: setup monitoring
	test/vm/prepare.sh
	test/vm/tests.sh $(KERNELS)

test-vm-short: setup monitoring
	test/vm/prepare.sh
	SHORT=1 PART=$(PART) test/vm/tests.sh $(KERNELS)

# A real Kubernetes of three nodes on this machine, its images, and tests with pods.
.PHONY: kubernetes cluster test-kubernetes
kubernetes: setup $(HELM) monitoring pod-guest
	test/kubernetes/setup.sh
	test/kubernetes/build.sh
	VERSION='$(VERSION)' deploy/image/build.sh
	test/kubernetes/images.sh

# Tests at a time, which mostly wait.
PODS ?= 12
test-kubernetes: kubernetes
	$(GO) test -tags kubernetes -count=1 -parallel $(PODS) -timeout $(TIMEOUT) $(TESTFLAGS) ./test/kubernetes

# Kubernetes' own storage suite on that cluster, for each of FS; .ci/run has one of them, without slow specs.
# MICROVM=1 runs its pods in microVMs.
.PHONY: test-storage
FS ?= ext4 xfs btrfs
test-storage: kubernetes
	test/kubernetes/build.sh storage
	test/kubernetes/storage.sh $(FS)

# What Kubernetes' end-to-end tests ask of every node for its pods. MICROVM=1 runs these in microVMs.
.PHONY: test-pods
test-pods: kubernetes
	test/kubernetes/build.sh pods
	test/kubernetes/pods.sh

# All that needs several nodes, whole: what the driver costs the API server too, upgrades of a release with Helm, a planned
# removal of a node, the storage suite, and the skew of versions.
.PHONY: test-fleet
test-fleet: TIMEOUT = 180m
test-fleet: kubernetes releases
	test/kubernetes/release-images.sh
	$(GO) test -tags kubernetes,fleet -count=1 -parallel $(PODS) -timeout $(TIMEOUT) $(TESTFLAGS) ./test/kubernetes
	$(MAKE) test-storage
	$(MAKE) test-skew

# A kubelet and containerd on a node whose kernel enforces SELinux: that cluster in a guest of
# test-vm. A quarter of an hour, for it is software emulation; not part of .ci/run.
.PHONY: test-kubernetes-selinux
test-kubernetes-selinux: kubernetes
	test/vm/prepare.sh
	$(GO) test -tags kubernetes -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) ./test/kubernetes/selinux

# Tests with other versions of Kubernetes, containerd and OCI runtimes, a node each, on this machine and in guests with
# cgroups v2: test/kubernetes/versions/list. An hour or more, so not part of .ci/run. It writes docs/versions.md.
.PHONY: test-versions
test-versions: kubernetes
	$(GO) run ./test/kubernetes/versions $(VERSIONSFLAGS)

# What a kubelet shows of the driver's health, with a Kubernetes that asks for it: one node of the next
# version, with the feature gate CSIVolumeHealth.
.PHONY: test-kubernetes-health
test-kubernetes-health: kubernetes
	test/kubernetes/build.sh next
	$(GO) test -tags kubernetes -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) ./test/kubernetes/health

# The same cluster, to try things on: test/kubernetes/cluster.sh exec bash; ... down.
cluster: kubernetes
	test/kubernetes/cluster.sh up
	test/kubernetes/cluster.sh exec kubectl apply -k $(CURDIR)/.cache/kubernetes/bin/crd

# A SELinux label of 100,000 files against chcon -R, in a guest.
.PHONY: bench-vm
bench-vm: setup
	test/vm/prepare.sh
	test/vm/tests.sh 6.1 -tags vm -run '^$$' -bench S05 ./test/node

# The same volume with and without a SELinux label, in a guest.
.PHONY: demo-selinux
demo-selinux: setup build
	test/vm/prepare.sh
	.cache/vm/vm run -kernel 6.12 .cache/vm/vm exec /bin/bash $(CURDIR)/scripts/demo-selinux.sh

# What the tests and demos of CRUST boot: Debian's kernel and crust-guest.
.PHONY: guest
guest: setup
	scripts/guest.sh

# The programs of the releases in test/skew/releases, which today's are tested beside; test-skew is these
# tests alone. They are part of make test.
.PHONY: releases test-skew
releases:
	scripts/releases.sh

test-skew: setup guest releases
	$(GO) test -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) ./test/skew
	$(GO) test -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) -run OfAReleaseUnderTodays ./test/crust
	$(GO) test -count=1 -run OfReleases $(TESTFLAGS) ./internal/audit ./internal/microvm ./pkg/...

# The records that a release writes, kept in test/skew/testdata: make fixtures OF=vVERSION. OF=today: what no
# release has written yet.
.PHONY: fixtures
fixtures: setup releases
	CRUST_FIXTURES=$(OF) $(GO) test -tags fixtures -count=1 $(TESTFLAGS) -run TestWriteFixtures ./test/skew

# What the tests of deploy/monitoring run: Prometheus, promtool and a parser of queries.
.PHONY: monitoring
monitoring: setup
	scripts/monitoring.sh

# The dashboard in the documents, drawn of what the tests' Prometheus has seen.
.PHONY: picture
picture: monitoring
	CRUST_PICTURE=docs/pictures/dashboard.svg $(GO) test -count=1 ./test/monitoring

# A volume that a microVM mounts, and this machine never does.
.PHONY: demo-crust
demo-crust: setup build guest
	scripts/demo-crust.sh

# A pod in a microVM, on a cluster of one node on this machine.
.PHONY: demo-pod
demo-pod: kubernetes
	scripts/demo-pod.sh

# The guest of pods in microVMs, which tests of them make by themselves.
.PHONY: pod-guest
pod-guest:
	scripts/pod-guest.sh

# The generated code of the protocols, after a change of a .proto file.
.PHONY: generate protocols
BUF := .cache/bin/buf
$(BUF): tools/buf/go.mod
	mkdir -p .cache/bin
	for t in google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc github.com/bufbuild/buf/cmd/buf; do \
		$(GO) build -C tools/buf -o $(CURDIR)/.cache/bin/ $$t || exit 1; done

generate: $(BUF)
	$(BUF) generate
	$(BUF) generate --template buf.gen.inventory.yaml

# That the protocols are well, still what they were in the last release, and that the code is theirs.
protocols: $(BUF)
	$(BUF) lint
	$(BUF) breaking pkg/crust --against pkg/crust/v1alpha1/baseline.binpb
	$(BUF) breaking internal/inventory --against internal/inventory/baseline.binpb
	$(BUF) generate
	$(BUF) generate --template buf.gen.inventory.yaml
	git diff --exit-code --stat -- '*.pb.go'

# The manual pages of crustctl and csi-node, in bin/man: man -l bin/man/crustctl.8.
.PHONY: man
man:
	mkdir -p bin/man
	$(GO) run -tags man -ldflags '$(LDFLAGS)' ./cmd/crustctl bin/man
	$(GO) run -tags man -ldflags '$(LDFLAGS)' ./cmd/csi-node bin/man

# After a release: what later changes of the protocols are compared with. make baseline OF=vVERSION
.PHONY: baseline
baseline: $(BUF) releases
	@test -n "$(OF)" || { echo 'baseline: give OF=vVERSION, of a line in test/skew/releases' >&2; exit 1; }
	$(BUF) build --exclude-source-info .cache/skew/$(OF)/source/pkg/crust -o pkg/crust/v1alpha1/baseline.binpb
	$(BUF) build --exclude-source-info .cache/skew/$(OF)/source/internal/inventory -o internal/inventory/baseline.binpb

# Helm, and the chart as a package. The same chart gives the same bytes.
.PHONY: helm chart
helm: $(HELM)
$(HELM): deploy/helm/go.mod
	mkdir -p .cache/bin
	$(GO) build -C deploy/helm -o $(CURDIR)/$@ helm.sh/helm/v4/cmd/helm

chart: $(HELM)
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-1767225600} $(HELM) package deploy/helm/crust-csi -d .cache/chart
# The files of a release, for amd64 and arm64, in dist/vVERSION; docs/release.md.
# release-check makes them twice, in two places, and compares the bytes.
.PHONY: release release-check test-release
release:
	scripts/release.sh

release-check:
	scripts/release-check.sh

# What makes the images and the release, on small things.
test-release:
	cd deploy/image && test -z "$$(gofmt -l .)" && $(GO) vet ./... && $(GO) test -count=1 $(TESTFLAGS) ./...
	cd deploy/release && test -z "$$(gofmt -l .)" && $(GO) vet ./... && $(GO) test -count=1 $(TESTFLAGS) ./...

# The tests that need neither root nor a kernel of arm64, as arm64 programs.
.PHONY: test-arm64
test-arm64:
	scripts/test-arm64.sh $(TESTFLAGS)

# Those that need a kernel of arm64, in an emulated machine that has one: some minutes.
.PHONY: test-arm64-vm
test-arm64-vm:
	test/vm/arm64.sh

clean:
	rm -rf bin .cache dist

# What attacks the driver, for hours.
.PHONY: soak
HOURS ?= 4
soak: setup guest
	scripts/soak.sh $(HOURS)

# Measures what grows with volumes, publishes and files; pictures go to docs/pictures.
.PHONY: scale
scale: setup build
	$(GO) run ./test/scale $(SCALEFLAGS)

# Ratios against k8s.io/mount-utils and an empty call; see docs/performance.md.
.PHONY: bench
bench: setup build pod-guest
	command -v fio >/dev/null || scripts/apt.sh install fio
	$(GO) build -o bin/ ./test/bench
	taskset -c 0,1 unshare -m --propagation private bin/bench
	cd test/bench/kubelet && $(GO) build -o ../../../bin/kubelet-ownership .
	unshare -m --propagation private bin/bench -files $(FILES)
	unshare -m --propagation private bin/bench -guest .cache/guest
	unshare -m --propagation private bin/bench -agent
	@printf '| what | against | measured | ratio | target |\n|---|---|---|---|---|\n'
	$(GO) test -tags bench -exec $(CURDIR)/scripts/own-mounts.sh -count=1 -timeout $(TIMEOUT) -run TestSpeed_ ./test/crust >bin/speed.log; \
		s=$$?; grep -E '^(\||--- FAIL|ok|FAIL)' bin/speed.log; exit $$s
