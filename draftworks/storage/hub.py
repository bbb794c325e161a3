"""Files of the Hugging Face hub at a pinned commit, with errors that say what to do. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftworks.errors import ConfigError


@contextmanager
def _without_retries_in_the_log() -> Iterator[None]:
    """Let the hub's client log no attempt that it repeats: the error at the end says what was wrong."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@_without_retries_in_the_log()
def fetch_hub_file(where: str, model: str, revision: str, filename: str) -> Path | None:
    """Return the local path of a hub file, downloaded if necessary; None if the repository has no such file at that commit.

    Args:
        where: the owner of the file in messages, as in "target mine".

    Raises:
        ConfigError: the hub cannot be reached, refuses access, or knows no such id or commit.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, filename, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, EntryNotFoundError, OSError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise ConfigError(f"{where}: {model} at commit {revision[:12]}: {_explain(filename, error)}") from error


def find_cached_hub_file(model: str, revision: str, filename: str) -> Path | None:
    """Return the local path of a hub file if the cache has it; nothing is asked of the hub."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, filename, revision=revision)
    return Path(found) if isinstance(found, str) else None


@_without_retries_in_the_log()
def find_revision(where: str, model: str) -> str:
    """Return the newest commit of a model that the cache has, or else the hub.

    Raises:
        ConfigError: the cache has none, and the hub cannot be reached or knows no such id.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    folder = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    cached = folder / "refs" / "main"
    if cached.is_file():
        return cached.read_text().strip()
    try:
        if constants.HF_HUB_OFFLINE:
            raise LocalEntryNotFoundError("no commit of it is in the cache")
        return str(HfApi().model_info(model, timeout=30).sha)
    except (HfHubHTTPError, HTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"{where}: {model}: {_explain('its newest commit', error)}") from error


@_without_retries_in_the_log()
def list_dataset_files(where: str, dataset: str, revision: str) -> list[str]:
    """Return the names of all files of a data set of the hub at a commit. `where` and errors as in `fetch_hub_file`."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if constants.HF_HUB_OFFLINE:
            raise LocalEntryNotFoundError("the list of files is not in the cache")
        return list(HfApi().list_repo_files(dataset, repo_type="dataset", revision=revision))
    except (HfHubHTTPError, HTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"{where}: {_explain_dataset('the list of its files', error)}") from error


@_without_retries_in_the_log()
def fetch_dataset_file(where: str, dataset: str, revision: str, filename: str) -> Path | None:
    """Return the local path of a file of a data set of the hub, as `fetch_hub_file` does for a model's."""
    from httpx import HTTPError
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(dataset, filename, repo_type="dataset", revision=revision))
    except (
        *(HfHubHTTPError, HTTPError, HFValidationError, LocalEntryNotFoundError, EntryNotFoundError),
        OSError,
    ) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise ConfigError(f"{where}: {_explain_dataset(filename, error)}") from error


def _explain_dataset(filename: str, error: Exception) -> str:
    told = _explain(filename, error).replace("the model", "the data set").replace("such model", "such data set")
    for wrong in ("give a local directory instead of the id", "give a local directory"):
        told = told.replace(wrong, "name a local copy of the files")
    return told


HubHeader = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor of a safetensors file, by name."""


@_without_retries_in_the_log()
def fetch_hub_header(where: str, model: str, revision: str, filename: str) -> Path | HubHeader | None:
    """Return the path of a safetensors file if the cache has it, else only its header, fetched from the hub.

    None if the repository has no such file at that commit. `where` is as in `fetch_hub_file`.

    Raises:
        ConfigError: as in `fetch_hub_file`, or the file is not a safetensors file.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    cached = try_to_load_from_cache(model, filename, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    if cached is not None:  # the cache knows that there is no such file
        return None
    try:
        if constants.HF_HUB_OFFLINE:
            raise LocalEntryNotFoundError(f"{filename} is not in the cache")
        found = HfApi().parse_safetensors_file_metadata(model, filename, revision=revision)
    except (HfHubHTTPError, HTTPError, NotASafetensorsRepoError, SafetensorsParsingError, OSError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise ConfigError(f"{where}: {model} at commit {revision[:12]}: {_explain(filename, error)}") from error
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.tensors.items()}


def _explain(filename: str, error: Exception) -> str:
    """Return the failure and its remedy in words."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match error:
        case LocalEntryNotFoundError():
            return f"{filename} is not in the cache and the hub cannot be reached. Check the network, or give a local directory"
        case GatedRepoError():
            return (
                "the model is gated. Accept its terms on the model's page and set HF_TOKEN, "
                "or give a local directory instead of the id"
            )
        case RepositoryNotFoundError() | HFValidationError():
            return (
                "the hub has no such model, or it is private. Correct the id, set HF_TOKEN, "
                "or give a local directory instead of the id"
            )
        case RevisionNotFoundError():
            return "the model has no such commit. Correct the revision: the commit of 40 hex digits"
    return (
        f"{filename} cannot be fetched: {type(error).__name__}: {error}. Check the network and HF_TOKEN, "
        "or give a local directory instead of the id"
    )
