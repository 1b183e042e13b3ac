# The active environment, or .venv if none is active
BIN := $(if $(VIRTUAL_ENV),,$(if $(wildcard .venv/bin/python),.venv/bin/))

.PHONY: all export test docs clean

all: export test docs

export:  # notebooks → modules and README (index.ipynb is run again, for its list of chapters); notebooks cleaned
	$(BIN)nbdev_export
	$(BIN)python docs_site/execute.py nbs/index.ipynb
	$(BIN)nbdev_clean
	$(BIN)python docs_site/readme.py

test:    # the notebooks' own tests, then the same tests against the exported modules and all of tests/
	$(BIN)nbdev_test
	$(BIN)pytest

docs:    # the site, in docs_site/_site
	$(BIN)python docs_site/build.py

clean:   # what can be made again
	rm -rf build dist *.egg-info _proc _site docs_site/_site .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
