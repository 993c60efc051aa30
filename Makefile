# svcproxy. "make" alone lists the tasks. A task installs what it needs.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Package tests and tools install to the sbin folders, which PATH may lack.
export PATH := $(PATH):/usr/sbin:/sbin

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)

# What demo, lab and bench act on; set on the command line.
MODE ?= iptables
SCENARIO ?= testdata/scenarios/clusterip.txtar
# Arguments for "go test" of make test, as in: make test ARGS='-run ClusterIP'
ARGS ?=
# What bench compares with, NAME or NAME=COMMAND, and in which clusters; see bench/README.md.
AGAINST ?= kube-proxy
SERVICES ?= 5000
ROUNDS ?= 3

# -count=1: what a test asks of the kernel and of the built binary is nothing that
# the test cache knows of.
GO_TEST := go test -json -count=1 -timeout 20m

.PHONY: help
help: ## list the tasks
	@echo "usage: make TASK"
	@echo
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "demo, test, test-cluster, lab and bench make network namespaces and need root;"
	@echo "they touch no interface, rule or setting outside of these."

.PHONY: packages
packages: ## install the Debian packages that building and testing need
	@scripts/debian-packages
	@scripts/check-go

.PHONY: root
root:
	@[ "$$(id -u)" -eq 0 ] || { echo "This makes network namespaces and needs root: sudo -E env PATH=\"\$$PATH\" make $(MAKECMDGOALS)" >&2; exit 1; }

.PHONY: build
build: ## build bin/svcproxy, static and stripped
	@scripts/check-go
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/svcproxy

.PHONY: demo
demo: packages root build ## serve a small cluster in one mode (MODE=iptables) and show who answers
	@bin/svcproxy demo --mode $(MODE)

.PHONY: test
test: test-host $(if $(ARGS),,test-vm) ## vet, unit and kernel tests, all scenarios in every mode (rings 1 to 6)

.PHONY: test-host
test-host: packages root ## the part of it that this system's kernel can do
	go vet ./...
	$(GO_TEST) $(ARGS) ./... | go run ./test/verdict -title 'rings 1 to 6' \
		-expected-skips test/expected-skips -expected-skips test/expected-skips-kernel

.PHONY: test-cluster
test-cluster: tools test ring7 ## the same, then the binary behind a real API server (ring 7)

.PHONY: ring7
ring7: packages root
	go vet -tags cluster ./test/cluster
	set -- $$(scripts/tools etcd kube-apiserver kube-proxy kube-controller-manager helm); \
	SVCPROXY_ETCD=$$1 SVCPROXY_KUBE_APISERVER=$$2 SVCPROXY_KUBE_PROXIES="1.37=$$3" SVCPROXY_CONTROLLER_MANAGER=$$4 SVCPROXY_HELM=$$5 $(GO_TEST) -tags cluster $(if $(CI),-short) $(ARGS) ./test/cluster \
		| go run ./test/verdict -title 'ring 7' -expected-skips test/expected-skips

.PHONY: vulnerabilities
vulnerabilities: ## look for known vulnerabilities, where Go's database can be reached
	@status=0; scripts/vulnerabilities || status=$$?; \
	case $$status in 0) echo "1 passed, 0 failed, 0 skipped" ;; 3) echo "0 passed, 0 failed, 1 skipped" ;; *) exit 1 ;; esac

.PHONY: manifests
manifests: ## write deploy/svcproxy.yaml anew from the chart
	SVCPROXY_HELM=$$(scripts/tools helm) go test -count=1 -tags cluster -run TestManifestsAreTheChart ./test/cluster -update

.PHONY: image
image: packages ## build dist/svcproxy.tar, an OCI image layout; needs no container engine
	VERSION=$(VERSION) deploy/image oci dist/svcproxy.tar

# For how long each mode is broken, and the seed.
CHAOS ?= -duration $(if $(CI),10s,20s)

.PHONY: chaos
chaos: packages root ## break each mode at random for a time (CHAOS='-duration 5m -seed 7 -modes nftables')
	$(GO_TEST) -tags chaos -timeout 60m -run TestChaos ./test/chaos -args $(CHAOS) | go run ./test/verdict -title 'chaos' -expected-skips test/expected-skips

.PHONY: chaos-vm
chaos-vm: packages root ## the same in the virtual machine: ipvs mode, and the clock jumps (CHAOS='-modes ipvs -duration 5m')
	scripts/chaos-vm $(if $(filter command line,$(origin CHAOS)),$(CHAOS)) | go run ./test/verdict -title 'chaos, virtual machine' -expected-skips test/expected-skips

# More flags, such as -legacy for iptables mode.
SOAK ?=

.PHONY: soak
soak: packages root ## create and delete 10,000 Services 20 times (MODE=iptables SOAK=-legacy)
	go test -count=1 -v -tags chaos -timeout 120m -run TestSoak ./test/chaos -args -services 10000 -modes $(MODE) $(SOAK)

.PHONY: scale
scale: packages root ## what 50,000 Services with 250,000 endpoints cost (MODE=nftables)
	go test -count=1 -v -tags chaos -timeout 60m -run TestScale ./test/chaos -args -services 50000 -modes $(MODE)

# Beside 1.37, whose build ring 7 needs too; each other one takes minutes to build once.
KUBE_PROXIES ?= 1.29 1.33

.PHONY: test-migration
test-migration: packages root ## take over from kube-proxies under load, building them first (KUBE_PROXIES="1.29 ... 1.36")
	set -- $$(scripts/tools etcd kube-apiserver kube-proxy $(addprefix kube-proxy-,$(KUBE_PROXIES))); \
	export SVCPROXY_ETCD=$$1 SVCPROXY_KUBE_APISERVER=$$2 SVCPROXY_KUBE_PROXIES="1.37=$$3"; shift 3; \
	for version in $(KUBE_PROXIES); do SVCPROXY_KUBE_PROXIES+=" $$version=$$1"; shift; done; \
	$(GO_TEST) -tags cluster -run TestMigration ./test/cluster | go run ./test/verdict -title 'migration' -expected-skips test/expected-skips

# What test-vm runs: without, what scripts/test-vm says.
VM_MODES ?=
VM_SCENARIOS ?=

.PHONY: test-vm
test-vm: packages root ## the rest, on Debian's own kernel in a virtual machine (VM_MODES=ipvs VM_SCENARIOS=sctp)
	scripts/test-vm $(if $(VM_SCENARIOS),$(or $(VM_MODES),ipvs),$(VM_MODES)) $(VM_SCENARIOS) | go run ./test/verdict -title 'virtual machine' -expected-skips test/expected-skips

.PHONY: race
race: packages ## the tests of the concurrent packages under the race detector
	CGO_ENABLED=1 go test -race -json -timeout 20m $(RACE) | go run ./test/verdict -title 'race detector' -expected-skips test/expected-skips

RACE := ./internal/plan/... ./internal/planner/... ./internal/delta/... ./internal/cluster/... ./internal/dataplane/... ./internal/health/... ./internal/metrics/... ./internal/config/...

.PHONY: tools
tools: packages ## build etcd, kube-apiserver and upstream's kube-proxy at their pinned versions
	@scripts/tools etcd kube-apiserver kube-proxy >/dev/null

.PHONY: lint
lint: packages ## formatting, linters and import rules
	"$$(scripts/tools golangci-lint)" run --allow-parallel-runners ./...
	go test -count=1 ./internal/arch

.PHONY: lab
lab: packages root build ## run one scenario, keep its hosts for a look (SCENARIO=FILE MODE=iptables)
	go run ./cmd/scenario --svcproxy bin/svcproxy --mode $(MODE) --trace --keep $(SCENARIO)
	@echo
	@echo "Look around with: ip netns exec NAME iptables-save; take a host away with: ip netns del NAME"

.PHONY: bench
bench: packages root build ## measure against another proxy in one run (AGAINST=kube-proxy SERVICES=5000)
	go run ./bench compare --mode $(MODE) --services $(SERVICES) --rounds $(ROUNDS) --against '$(AGAINST)'

.PHONY: clean
clean: ## remove what was built here; the tools' cache stays
	rm -rf bin dist
