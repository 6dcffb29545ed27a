# Everything runs in .venv, which the targets create and keep up to date with constraints.txt.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: help demo test test-browser test-cluster test-integrations test-slow test-paper-scale bench docs docs-check docs-figures docs-versioned dist clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-17s %s\n", $$1, $$2}'

demo: .venv/.lab  ## see both halves: three trainings with their report, and the explorer (2 minutes on two idle cores)
	$(BIN)/python -m orthocond demo

test: .venv/.dev  ## lint, types, unit tests, doctests, README and examples: at most 12 minutes on two cores
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder && wait $$types

test-browser: .venv/.dev  ## the pages in a real browser; installs Debian's Chromium if there is none
	command -v chromium >/dev/null || command -v google-chrome >/dev/null || apt-get install -y chromium
	$(BIN)/python -m pytest tests/test_explorer_browser.py tests/test_explorer_models.py tests/test_report_browser.py

test-integrations: .venv/.dev  ## the examples with Lightning and the Trainer of Hugging Face; installs both
	$(BIN)/python -m pip install -q -c constraints.txt "lightning>=2.6.4" transformers
	$(BIN)/python -m pytest tests/test_examples.py -k loops_of_others

test-cluster: .venv/.dev  ## tables on a real Slurm, which is started for it; installs Debian's if there is none, needs root
	command -v /usr/sbin/slurmctld >/dev/null || apt-get install -y slurm-wlm munge
	$(BIN)/python -m pytest -m cluster tests/test_cluster.py

test-slow: .venv/.dev  ## the longer checks that `make test` leaves out
	$(BIN)/python -m pytest -m slow --timeout 1800 --ignore tests/test_paper_scale.py

test-paper-scale: .venv/.dev  ## two real steps of every row of every table at the paper's scale: half an hour on one core
	$(BIN)/python -m pytest -m slow tests/test_paper_scale.py --timeout 3600

bench: .venv/.dev  ## time everything beside its baselines (an hour); results in benchmarks/results, pages in docs
	for name in matrix_functions layers steps weights growth processes start training_step inference data; do \
		$(BIN)/python benchmarks/$$name.py --output benchmarks/results/$$name.json || exit 1; done
	$(BIN)/python benchmarks/growth.py --output benchmarks/results/growth.json --figure docs/growth.png
	$(BIN)/python benchmarks/page.py docs/speed.md
	$(BIN)/python benchmarks/precision.py --output docs/precision.md

docs: .venv/.docs  ## build the documentation in docs/_build
	rm -rf docs/api/generated
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build
	@echo "open docs/_build/index.html"

docs-check: docs .venv/.dev  ## open every page in Chromium, wide and as on a phone: no overflow, no network, copy buttons, search
	$(BIN)/python docs/check_pages.py docs/_build

docs-figures: .venv/.dev  ## make the pictures of the documentation anew (five minutes)
	$(BIN)/python docs/make_figures.py

docs-versioned: .venv/.docs  ## build it in docs/_build/html/VERSION, beside other versions, with a page that lists them
	rm -rf docs/api/generated
	version=$$($(BIN)/python -c "import orthocond; print(orthocond.__version__)") && \
	$(BIN)/sphinx-build -W --keep-going -q -b html -A versions=yes docs docs/_build/html/$$version && \
	$(BIN)/python docs/versions.py docs/_build/html

dist: .venv/.dist  ## build wheel and sdist in dist, and try the wheel in an empty environment for each extra
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PYTHON) .ci/try_wheel.py dist/*.whl

clean:  ## remove what the targets made, but no results
	rm -rf .venv dist docs/_build .pytest_cache .mypy_cache .ruff_cache

# One stamp for each extra: installing again is skipped while neither file has changed. The build backend comes from the
# same constraints, hence no build isolation.
.venv/.%: pyproject.toml constraints.txt
	@echo "Installing orthocond[$*] into .venv; up to 3 minutes and 2 GB the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt hatchling editables
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[$*]"
	touch $@
