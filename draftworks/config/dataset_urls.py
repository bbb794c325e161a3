"""URLs of data sets: `s3://bucket/pattern` and `hf://datasets/org/name@commit/pattern`. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from draftworks.storage.object_access import parse_object_url

_HUB = re.compile(r"hf://datasets/(?P<dataset>[\w.-]+/[\w.-]+)(?:@(?P<commit>[^/]*))?/(?P<pattern>.+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ObjectFiles:
    """Objects of a bucket whose names a pattern matches."""

    bucket: str
    pattern: str


@dataclass(frozen=True)
class HubFiles:
    """Files of a data set on the Hugging Face hub at a commit whose names a pattern matches."""

    dataset: str
    commit: str
    pattern: str


def is_url(pattern: str) -> bool:
    """Whether an entry of `files` names files that are not on this machine."""
    return "://" in pattern


def parse_dataset_url(url: str) -> ObjectFiles | HubFiles:
    """Return what a URL names.

    Raises:
        ValueError: it is no URL of data that can be read, or names a branch of the hub and not a commit.
    """
    scheme = url.partition("://")[0]
    if scheme == "s3":
        bucket, _, pattern = url.removeprefix("s3://").partition("/")
        parse_object_url(f"s3://{bucket}")
        if not pattern or pattern.endswith("/"):
            raise ValueError("expected the name of a file, or a pattern such as s3://bucket/chats/*.jsonl")
        return ObjectFiles(bucket, pattern)
    if scheme != "hf":
        raise ValueError(f"expected a path, s3://bucket/… or hf://datasets/…, found {scheme}://")
    found = _HUB.fullmatch(url)
    if found is None:
        raise ValueError("expected hf://datasets/org/name@commit/file, such as hf://datasets/org/name@0123…/*.parquet")
    commit = found["commit"]
    if commit is None or not _COMMIT.fullmatch(commit):
        raise ValueError(
            f"expected a commit of 40 hex digits behind hf://datasets/{found['dataset']}@, found {commit or 'none'}: what "
            "a branch names changes, and with it what was trained on"
        )
    return HubFiles(found["dataset"], commit, found["pattern"])
