"""A checkpoint on the Hub: only the files that a load reads, and one error for whatever goes wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from converters.checkpoint import INDEX, WHOLE, CheckpointError, weight_map
from transformer_std.saving import CONFIG as OUR_CONFIG
from transformer_std.saving import TOKENIZER_FILES

ADAPTER = "adapter_config.json"
CONFIGS = ["config.json", OUR_CONFIG, ADAPTER]
EXTRA = ["generation_config.json", *TOKENIZER_FILES, "tokenizer-*/*"]  # the last is where our own format has it


def download(repo: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder in the Hub's cache that holds a checkpoint; what is not there yet is fetched, unless HF_HUB_OFFLINE=1.

    Args:
        repo: owner/name.
        revision: branch, tag or commit.
        weights: False for the configs alone.

    Raises:
        CheckpointError: there is no such repo, revision or file, or it cannot be reached and is not in the cache.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _one_error(repo, revision):
        try:
            wanted = [*CONFIGS, INDEX, *EXTRA] if weights else CONFIGS
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
        except LocalEntryNotFoundError as error:
            # Another program may have cached all that is needed and not all that is wanted.
            try:
                folder = Path(hf_hub_download(repo, "config.json", revision=revision, local_files_only=True)).parent
            except LocalEntryNotFoundError:
                raise error from None
        for file in _weight_files(repo, folder) if weights else []:
            with _one_error(repo, revision, file):
                hf_hub_download(repo, file, revision=folder.name)
    return folder


def _weight_files(repo: str, folder: Path) -> list[str]:
    """What is still to be fetched: a single file wins over shards, as in transformers."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    held = [name for name in CONFIGS if (folder / name).exists()]
    if not held or ADAPTER in held:  # there is nothing to load, as reading the config will say
        return []
    if not (folder / INDEX).exists():
        return [WHOLE]
    try:
        hf_hub_download(repo, WHOLE, revision=folder.name)
    except EntryNotFoundError:  # none there, or none here and offline
        return sorted(set(weight_map(folder / INDEX).values()))
    return []


@contextlib.contextmanager
def _one_error(repo: str, revision: str | None, file: str = "") -> Iterator[None]:
    from huggingface_hub import constants, errors

    what = f"{file} of {repo}" if file else repo
    try:
        yield
    except errors.HFValidationError:
        raise CheckpointError(f"{repo!r} is neither a folder here nor a Hub id (owner/name)") from None
    except errors.GatedRepoError:
        raise CheckpointError(f"{repo} is gated: accept its terms on the Hub, and log in (hf auth login)") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{repo!r} is no folder here and not on the Hub; if it is private, log in (hf auth login)"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{repo} has no revision {revision!r}") from None
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the Hub was not reached ({_first_line(error)})"
        raise CheckpointError(f"{what} is not in the cache, and {why}") from None
    except errors.EntryNotFoundError:
        more = f"which {INDEX} lists" if file != WHOLE else f"nor {INDEX}; pickled weights are not read"
        raise CheckpointError(f"{repo} has no {file}, {more}") from None
    except (OSError, errors.HTTPError) as error:
        raise CheckpointError(
            f"fetching {what} failed, and can be taken up again: {type(error).__name__}: {_first_line(error)}"
        ) from None


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause) or type(cause).__name__).splitlines()[0]
