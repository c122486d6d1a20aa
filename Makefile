# One target per task; .ci/run and the README call only these. `make help` lists them.
# The environment .venv is made and kept up to date by .ci/setup. PYTHON chooses the interpreter, ARGS adds options:
#   make compare ARGS="--preset full"        make test ARGS="tests/unit -k codec"
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
RUN := docs/results/2026-11-29-h200-models/vit_b_16
.PHONY: help setup engines compare test test-engines test-slow test-compose benchmark lint reference picture docs dist format doctor repo lock pin-images clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## make the virtual environment (other targets run this as needed)

# The dependency on pyproject.toml and the constraints renews an old environment.
$(VENV)/.ready: pyproject.toml docker/constraints.txt .ci/setup
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh .ci/setup

engines: $(VENV)-engines/.ready ## make the second environment, for JAX (6.4 GiB)

$(VENV)-engines/.ready: pyproject.toml docker/constraints.txt .ci/setup .ci/engines .ci/engines.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)-engines" sh .ci/engines

compare: setup ## compare both servers: start them, measure, print the verdict, write the report
	@$(BIN)/abserve compare $(ARGS)

# Tests with servers mostly wait, so that three run at a time, with one thread for torch, whose threads otherwise keep a core
# busy while they wait. Unit tests compute: two run beside those, and get the time of the cores that they leave (nice).
# Folders with long files come first, and xdist keeps that order, so that no worker has a long file alone at the end. Those
# in folders named `alone` watch time pass: nothing that computes runs beside them.
# Two files only wait, for servers that are slow by plan, so that they would keep one of the three for minutes: another
# process runs them.
# No pytest of these imports plugins that it does not need: schemathesis takes a second and a half, for one file of slow
# tests. A worker imports only the files that it runs, so that the share of all tests that is done is not known.
PYTEST       := $(BIN)/python -m pytest
LIGHT        := -p no:schemathesis -p no:locust -p no:anyio -p tests.late_files -o console_output_style=classic \
	--ignore=tests/conformance/test_openapi_requests.py
WAITING      := tests/truth/test_servers_at_their_best.py tests/truth/test_streams_by_url.py
ALONE        := -n 3 --dist loadfile tests/integration/loadgen/alone tests/truth/alone
SERVERS      := -n 3 --dist loadfile --no-loadscope-reorder --ignore-glob='*/alone/*' $(WAITING:%=--ignore=%) \
	tests/truth tests/integration tests/conformance
UNITS        := -n 2 --dist loadfile --no-loadscope-reorder tests/golden tests/unit tests/compose

# Where memory has room for 4 GB the tests' files are there: to create one took 0.014 ms, and 0.36 on the disk. Not for the
# setup, whose packages need more.
IN_MEMORY     = $(shell grep -q '^[^ ]* /dev/shm [^ ]* [^ ]*noexec' /proc/mounts || \
	df --output=avail,target /dev/shm 2>/dev/null | awk '$$1 + 0 > 4000000 {print $$2}')
# The tests start hundreds of processes, which would compile the same modules again and again.
test: export PYTHONDONTWRITEBYTECODE =
test: setup ## run the tests
ifeq ($(strip $(ARGS)),)
	@$(BIN)/python -m compileall -q abserve loadgen servers  # else a test in which files are short leaves short bytecode
	@export TMPDIR="$${TMPDIR:-$(IN_MEMORY)}" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive; status=0; said=$$(mktemp -d); \
	$(PYTEST) $(LIGHT) $(WAITING) >$$said/1 2>&1 & waiting=$$!; \
	nice $(PYTEST) $(LIGHT) $(UNITS) >$$said/2 2>&1 & units=$$!; \
	trap "kill $$waiting $$units; exit 130" INT; \
	$(PYTEST) $(LIGHT) $(SERVERS) || status=$$?; \
	wait $$waiting || status=$$?; wait $$units || status=$$?; cat $$said/1 $$said/2; rm -r $$said; \
	unset OMP_NUM_THREADS OMP_WAIT_POLICY; \
	$(PYTEST) $(LIGHT) $(ALONE) || status=$$?; \
	exit $$status
else
	@$(PYTEST) $(ARGS)
endif

test-engines: setup engines ## run the tests of JAX in the second environment, and serve with it
	@$(VENV)-engines/bin/python -m pytest tests/engines $(ARGS)
	@$(PYTEST) -m slow tests/integration/native/test_jax.py

test-slow: setup ## run the tests that take minutes, and those of the native server with three front ends
	@status=0; \
	$(PYTEST) -m "slow and not gpu and not compose" $(ARGS) || status=$$?; \
	ABSERVE_NATIVE_FRONTS=3 $(PYTEST) -n 2 --dist loadfile tests/integration/native tests/conformance \
		|| status=$$?; \
	exit $$status

test-compose: setup ## test the compose stack: build the images, start the cpu profile, load it, kill its services (needs Docker)
	@$(PYTEST) -m compose -s tests/compose $(ARGS)

# Whether these pass depends on how fast and how quiet the machine is; nothing in the other targets does.
benchmark: setup ## measure overheads and planted differences (needs an idle machine)
	@$(PYTEST) -m benchmark -s tests/benchmarks tests/truth tests/integration/loadgen $(ARGS)

lint: setup ## run ruff and mypy --strict, and check the compose files (with docker and promtool if installed)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(PYTEST) -q -p no:cacheprovider tests/compose/test_files.py

reference: setup ## regenerate what is made from the code: result.json's schema, docs/commands.md, options, known models
	@$(BIN)/python -m loadgen.verdict.result_schema > docs/result.schema.json.new
	@mv docs/result.schema.json.new docs/result.schema.json
	@$(BIN)/python .ci/command_reference.py > docs/commands.md.new
	@mv docs/commands.md.new docs/commands.md
	@$(BIN)/python .ci/python_options.py > abserve/options.py.new
	@mv abserve/options.py.new abserve/options.py
	@$(BIN)/python .ci/model_catalogue.py > servers/models/catalogue.json.new
	@mv servers/models/catalogue.json.new servers/models/catalogue.json

picture: setup ## draw the pictures of the README and the docs again from published runs (needs Chromium)
	@$(BIN)/python .ci/terminal_picture.py docs/results/2026-11-29-h200/table docs/images/four-servers.svg
	@$(BIN)/python .ci/report_pictures.py $(RUN) docs/images
	@ls -l docs/images

docs: ## build the documentation site into site/html, with every link checked
	@test -x $(VENV)-docs/bin/zensical || ($(PYTHON) -m venv $(VENV)-docs && $(VENV)-docs/bin/pip install --quiet zensical)
	@rm -rf site && mkdir site && cp -r docs .ci/zensical.toml site/
	@$(VENV)-docs/bin/zensical build --strict --clean --config-file site/zensical.toml

dist: ## build and check the packages, install them in a fresh environment of every installed Python
	@PYTHON="$(PYTHON)" .ci/dist

format: setup ## format and fix the code with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

doctor: setup ## check this machine and print a remedy for everything that is missing
	@$(BIN)/abserve doctor $(ARGS)

repo: setup ## regenerate triton_model_repo/
	@$(BIN)/abserve triton-repo $(ARGS)

lock: ## regenerate docker/locks/: the images' packages with hashes, from pyproject.toml and the constraints
	@PYTHON="$(PYTHON)" sh docker/lock

pin-images: ## write the current digest of each image's tag into docker-compose.yml (needs Docker; ARGS names another file)
	@$(PYTHON) docker/pin_images.py $(ARGS)

clean: ## remove the environment, artefacts and results
	rm -rf $(VENV) $(VENV)-engines $(VENV)-docs site dist .artefacts results/* .pytest_cache .mypy_cache .ruff_cache .hypothesis
