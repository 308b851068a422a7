.PHONY: check test quick docs bench real

check:
	ruff check
	ruff format --check
	mypy

test:
	pytest

quick:
	pytest -m quick

docs:
	mkdocs build --strict

bench:
	python -m benchmarks

real:
	python -m venv .real
	.real/bin/pip install -e '.[big]' 'gguf>=0.17'
	.real/bin/pip install --no-deps -r real/requirements.txt
	.real/bin/python -m real
