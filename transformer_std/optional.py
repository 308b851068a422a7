"""transformers, which text, sampling and comparisons need and the model itself does not."""

from __future__ import annotations

from typing import Any


def transformers_for(what: str) -> Any:
    """The transformers library. Raises `ModuleNotFoundError` where it is absent, with `what` needs it."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":  # it is there, and something that it needs is not
            raise
        message = f"{what} needs transformers, which is not installed: pip install transformers"
        raise ModuleNotFoundError(message, name="transformers") from None
    return transformers
