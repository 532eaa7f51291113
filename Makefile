PYTHON ?= python3
BIN := .venv/bin
SOURCES := omnistage tests examples bench

.PHONY: install serve demo test check unit slow soak fuzz format clean

install: .venv/.installed

# torch first: with a CPU build present nothing asks for a larger one.
.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "setuptools>=77.0.3" wheel torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

serve: install
	$(BIN)/omnistage serve smol-speech

demo: install
	$(BIN)/python examples/demo.py

# The README's test command: style, types, import directions, then all tests.
test: install check unit slow

check: install
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports

unit: install
	$(BIN)/python -m pytest -m "not slow" -n 2

# A second try is for the shared cores of small machines; what was tried twice is named in the summary.
slow: install
	$(BIN)/python -m pytest -m slow -n 2 --dist loadscope --reruns 1 -r fER

# Mixed load, disconnects and killed stages for 20 minutes; SOAK_S=60 for a short one.
soak: install
	$(BIN)/python -m tests.reliability.soak --seconds $(or $(SOAK_S),1200)

# Property tests and decoders of outside bytes, fifty times as long as in `make test` and with new examples.
fuzz: install
	$(BIN)/python -m pytest --hypothesis-profile=fuzz --timeout=0 tests/security/test_decoders.py \
		tests/entrypoints/http/test_fuzz.py tests/engine/test_engine_machine.py tests/stages/ar/test_engine_machine.py

format: install
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache out
