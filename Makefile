.PHONY: check test quick docs bench

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
