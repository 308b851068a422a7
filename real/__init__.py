"""Checks on released weights, and the page of what they found, `docs/real-models.md`: `make real`."""
