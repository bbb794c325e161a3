# make demo   the main job for the target `tiny`, from conversations to a measured draft
# make ui     the Dagster UI on http://127.0.0.1:3000
# make test   linter and all tests
#
# Each sets up .venv first when needed. TORCH_INDEX chooses another build of torch, for example
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
TARGET ?= tiny
VENV := .venv
BIN := $(VENV)/bin
export DAGSTER_HOME := $(CURDIR)/.dagster
export OMP_NUM_THREADS ?= 1

.PHONY: demo ui test lint check clean

demo: $(VENV)/ready .dagster/ready
	@mkdir -p var
	PYTHONWARNINGS=ignore $(BIN)/dagster job execute -m spec_assets.definitions -j everything --tags '{"dagster/partition": "$(TARGET)"}' \
		-c jobs/console.yaml > var/demo.log
	@$(BIN)/draftworks summary $(TARGET)

ui: $(VENV)/ready .dagster/ready
	$(BIN)/dagster dev -w workspace.yaml -h 127.0.0.1 -p 3000

test: $(VENV)/ready .dagster/ready lint
	$(BIN)/python -m pytest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: $(VENV)/ready
	$(BIN)/draftworks check

# torch first and alone: without an index of its own, a later step would fetch the registry's default build.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ui,test,tensorboard]'
	@touch $@

# A new SQLite instance must be opened once before two processes open it at the same time.
.dagster/ready: $(VENV)/ready .dagster/dagster.yaml
	@$(BIN)/dagster instance info > /dev/null 2>&1
	@$(BIN)/dagster run list --limit 1 > /dev/null 2>&1
	@$(BIN)/dagster instance concurrency set gpu 1 > /dev/null 2>&1
	@touch $@

clean:
	rm -rf var .dagster/history .dagster/storage .dagster/schedules .dagster/logs .dagster/ready
