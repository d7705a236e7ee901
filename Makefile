# make            lists the targets
# make train      sets up what it needs, trains on this machine's GPUs, else in two CPU processes
# make test       sets up what it needs, runs the tests
#
# Each target first makes .venv with the pinned versions. To use your own environment:
#   make train PYTHON=/path/to/python VENV=
# Flags for ddp-mnist: make train ARGS="--epochs 5 --seed 1"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
RUN ?= runs/latest
PROCESSES ?= 2
CHAOS ?= 200

# Quoted if it is a path, which may have spaces; otherwise perhaps a command with arguments
GIVEN := $(if $(shell [ -x "$(PYTHON)" ] && echo yes),'$(PYTHON)',$(PYTHON))

ifeq ($(VENV),)
PY := $(GIVEN)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

OWN = PYTHON=/path/to/python VENV=
LAUNCH = $(PY) -m accelerate.commands.launch --main_process_port 0 --config_file accelerate_configs
TRAIN = -m ddp_mnist train --dataset auto
# A file on one worker, those that took longest the last time first: see tests/conftest.py. pytest
# keeps what it has compiled, or each worker would compile all tests again each time.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PY) -m pytest
WHOLE = --dist loadfile --no-loadscope-reorder
MULTINODE = $(PY) -m ddp_mnist multinode --machine-rank="$(MACHINE_RANK)" \
	--main-process-ip="$(MAIN_PROCESS_IP)" --main-process-port="$(MAIN_PROCESS_PORT)" \
	--num-machines="$(NUM_MACHINES)" --nproc-per-node="$(NPROC_PER_NODE)"
# What was left in the shell by another launcher must not decide how many nodes there are, or how to
# compute: the targets say so, and torchrun takes each PET_ variable for one of its flags.
unexport $(filter-out PET_SIGNALS_TO_HANDLE,$(filter PET_% ACCELERATE_%,$(.VARIABLES)))
# torchrun and accelerate launch would stop at SIGHUP (signal 1) even under nohup, which ignores it
ifneq ($(shell grep '^SigIgn:.*[13579bdf]$$' /proc/self/status 2>/dev/null),)
export PET_SIGNALS_TO_HANDLE ?= SIGTERM,SIGINT,SIGQUIT
endif
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# A variable that nothing reads would silently be ignored
FLAGS = DATASET EPOCHS BATCH_SIZE LR MODEL SEED RESUME RUN_DIR
$(foreach name,$(FLAGS) $(shell echo $(FLAGS) | tr A-Z a-z),$(if $(filter command,$(firstword $(origin $(name)))),\
$(error $(name)=$($(name)): is a flag, not a variable; make train ARGS="--$(shell echo $(name) | tr A-Z_ a-z-) $($(name))")))

$(if $(shell echo '$(PROCESSES)' | grep -xE '[1-9][0-9]*'),,\
$(error PROCESSES=$(PROCESSES): must be a whole number of at least 1))

.DEFAULT_GOAL := help
.PHONY: help venv train train-single train-multi train-multinode evaluate report doctor verify bench \
	test test-system soak check fmt gpu-check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## Make .venv with the pinned versions (about 6.5 GB on Linux, a few minutes)

# A set-up that failed half-way has no .ready: it says where it failed, and the next make continues.
# The import at the end finds a torch and a torchvision of different releases, which pip allows.
$(VENV)/.ready: pyproject.toml constraints.txt
	@fail() { echo "make venv: $$1" >&2; exit 1; }; \
	$(GIVEN) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	fail "$(PYTHON) is missing or older than Python 3.11; name one: make PYTHON=python3.12"; \
	$(PY) -c '' 2>/dev/null || $(GIVEN) -m venv --clear $(VENV) || \
	fail "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv"; \
	echo "setting up $(VENV) with the versions of constraints.txt (6.5 GB on Linux, minutes);" \
	"for an environment with your own torch, such as PyTorch's CPU wheels (see pytorch.org):" \
	"make $(MAKECMDGOALS) $(OWN)"; \
	env -u PYTHONPATH $(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' || \
	fail "pip failed (see above); check network and disk space, then make again, or use an \
	existing environment: make $(MAKECMDGOALS) $(OWN)"; \
	$(PY) -c 'import torch, torchvision' || \
	fail "torch and torchvision do not fit together (see above); make clean, then make again"; \
	touch $@

train: $(READY) ## Train on all GPUs of this machine, else in two CPU processes
	@gpus=$$($(PY) -c 'from ddp_mnist.cluster.hardware import gpus_for_make; print(gpus_for_make())') && \
	if [ "$$gpus" -gt 1 ]; then set -- multi_gpu.yaml --num_processes $$gpus $(TRAIN); \
	elif [ "$$gpus" -eq 1 ]; then set -- single_gpu.yaml $(TRAIN); \
	else set -- multi_cpu.yaml --num_processes $(PROCESSES) $(TRAIN); fi; \
	$(LAUNCH)/"$$@" --mixed-precision auto $(ARGS)

train-single: $(READY) ## Train in one process, without a launcher
	@$(PY) $(TRAIN) $(ARGS)

train-multi: $(READY) ## Train in PROCESSES=2 processes on this machine's CPU
	@$(LAUNCH)/multi_cpu.yaml --num_processes $(PROCESSES) $(TRAIN) --mixed-precision auto $(ARGS)

train-multinode: $(READY) ## Start this node (MACHINE_RANK= MAIN_PROCESS_IP=), or rehearse two here
	@$(MULTINODE) -- --dataset auto --mixed-precision auto $(ARGS)

evaluate: $(READY) ## Compute exact metrics of RUN=runs/latest on its test images
	@$(PY) -m ddp_mnist evaluate $(RUN) $(ARGS)

report: $(READY) ## Write an HTML page about RUN=runs/latest
	@$(PY) -m ddp_mnist report $(RUN) $(ARGS)

doctor: $(READY) ## Check this machine, or several (MACHINE_RANK= MAIN_PROCESS_IP=), before training
	@if [ -z "$(MACHINE_RANK)$(MAIN_PROCESS_IP)$(NUM_MACHINES)" ]; then $(PY) -m ddp_mnist doctor $(ARGS); \
	else $(MULTINODE) --verb doctor -- --mixed-precision auto $(ARGS); fi

verify: $(READY) ## Prove here that N processes train as one and resume exactly
	@$(PY) -m ddp_mnist verify $(ARGS)

bench: $(READY) ## Measure speed here: fit over a plain loop, 1 to N processes
	@$(PY) tools/bench.py $(ARGS)

test: $(READY) ## Run the tests (about 3 minutes on 2 cores, no network)
	@$(PYTEST) -n 3 $(WHOLE) $(ARGS)

test-system: $(READY) ## Test launchers, recipes, networks and documents (about 6 minutes)
	@$(PYTEST) -n 3 $(WHOLE) -m "system and not soak and not gpu" $(ARGS)

soak: $(READY) ## Run the long tests (under an hour); CHAOS=200 runs are hit at random
	@CHAOS=$(CHAOS) $(PY) -m pytest -m soak -n 2 --timeout 3600 $(ARGS)

gpu-check: $(READY) ## Run the tests that need a GPU
	@$(PY) -m pytest -m gpu $(ARGS)

check: $(READY) ## Lint, check the types, the budgets, and what the documents say
	@$(PY) -m ruff format --check . && $(PY) -m ruff check . && $(PY) -m mypy && $(PY) docs/check.py
	@$(PY) -m pytest -q tests/budgets.py

fmt: $(READY) ## Format the code
	@$(PY) -m ruff format . && $(PY) -m ruff check --fix .

clean: ## Remove .venv, caches and build output; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
