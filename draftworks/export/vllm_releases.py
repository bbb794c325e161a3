"""What each known release of vLLM reads of a draft in speculators' layout: the one table by which commands are printed.

Read in the wheels: `SUPPORTED_SPECULATORS_TYPES` of transformers_utils/configs/speculators/algos.py, and whether
transformers_utils/config.py wants the verifier on a hub ("must name a remote model repository"). A test compares this table
with the wheels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VllmRelease:
    """A release of vLLM.

    Attributes:
        version: major and minor number.
        speculators_types: values of `speculators_model_type` that it reads; it refuses every other.
        serves_local_verifier: whether `vllm serve DRAFT_FOLDER` takes a folder that names its target by a path.
    """

    version: str
    speculators_types: frozenset[str]
    serves_local_verifier: bool


_TYPES = frozenset({"eagle3", "peagle", "dflash", "dflash2", "dspark"})
RELEASES = (VllmRelease("0.32", _TYPES, True), VllmRelease("0.33", _TYPES, False))
"""Oldest first. A command is printed if all of them take it."""


def is_read(speculators_type: str) -> bool:
    """Return whether every known release reads this type."""
    return all(speculators_type in release.speculators_types for release in RELEASES)


def is_served_alone(speculators_type: str, is_local: bool) -> bool:
    """Return whether every known release serves a draft's folder alone, whose target is local or on a hub."""
    return is_read(speculators_type) and (not is_local or all(each.serves_local_verifier for each in RELEASES))


def name_releases() -> str:
    """Return the known versions as words: `0.32 and 0.33`."""
    return " and ".join(release.version for release in RELEASES)
