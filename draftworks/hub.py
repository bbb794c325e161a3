"""Files of the Hugging Face hub at a pinned commit, with errors a person can act on. Torch-free."""

from __future__ import annotations

from pathlib import Path

from draftworks.errors import ConfigError


def hub_file(where: str, model: str, revision: str, filename: str) -> Path | None:
    """Where a file of a hub repository is, downloaded if need be; None if it has no such file at that commit.

    Args:
        where: whose file it is, for messages: "target mine".

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
        raise ConfigError(f"{where}: {model} at commit {revision}: {_problem(filename, error)}") from error


def _problem(filename: str, error: Exception) -> str:
    """What went wrong and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match error:
        case LocalEntryNotFoundError():
            return (
                f"{filename} is not in the cache and the hub cannot be reached. Check the network (and HF_HUB_OFFLINE), "
                "or give a local directory instead of the id"
            )
        case GatedRepoError():
            return (
                "the hub wants its terms to be accepted. Accept them on the model's page and set HF_TOKEN, "
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
