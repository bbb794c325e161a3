"""Validation of addresses: of servers, and of data sets in object storage or on a hub. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from draftworks.storage.http_call import is_loopback
from draftworks.storage.object_access import parse_object_url


def parse_url(value: str) -> str:
    """Return an address without a trailing slash.

    Raises:
        ValueError: it is not an http(s) address with a host, has a query, or has a user or password, which would appear in
            logs and results. The message does not repeat the address.
    """
    try:
        parts = urlsplit(value)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts = complete = None
    if not parts or not complete or any(letter.isspace() for letter in value):
        raise ValueError("expected an address such as http://127.0.0.1:30000")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "an address must not contain a user or password: API keys are read from an environment variable"
        )
    if parts.query or parts.fragment:
        raise ValueError("a server address must not contain a query (?) or a fragment (#)")
    return value.rstrip("/")


_PAGES = (
    "metrics",
    "v1",
    "server_info",
    "get_server_info",
    "health",
    "health_generate",
    "generate",
    "completions",
    "models",
)
"""Last parts of the addresses of pages that servers have: an address that ends so is not that of the server."""


def require_root(url: str) -> str:
    """Return the address of a server. Raises ValueError for that of one of its pages."""
    root, _, page = url.rpartition("/")
    if page in _PAGES and urlsplit(url).path:
        raise ValueError(f"expected the address of the server, without /{page}; did you mean {root}?")
    return url


_CALLS = ("/chat/completions", "/completions", "/responses", "/embeddings", "/models")
"""Ends of the addresses of what is called below an API's base address."""


def require_api_root(url: str) -> str:
    """Return the base address of an OpenAI-compatible API. Raises ValueError for that of a server or of one of its calls."""
    root = next((url.removesuffix(call) for call in _CALLS if url.endswith(call)), url)
    if not urlsplit(root).path:
        root = f"{root}/v1"
    if root != url:
        raise ValueError(f"expected the address below which /chat/completions is; did you mean {root}?")
    return url


def require_private(url: str) -> str:
    """Return an address that others on the way cannot read along; the error does not repeat it."""
    if urlsplit(url).scheme != "https" and not is_loopback(url):
        raise ValueError("http is for this machine alone (127.0.0.1, localhost): use https, or a tunnel")
    return url


def parse_urls(values: list[str]) -> list[str]:
    """Return each address as `parse_url` does; raise ValueError also for a repeated address."""
    urls = [parse_url(value) for value in values]
    if len(set(urls)) < len(urls):
        raise ValueError("each address may be given only once: a server that is listed twice would get twice the work")
    return urls


def parse_endpoint(value: str) -> str:
    """Return an address `host:port`; raise ValueError if it is none. Port 0 stands for a free one."""
    host, colon, port = value.rpartition(":")
    if not (host and colon and port.isdigit() and int(port) < 1 << 16) or any(letter.isspace() for letter in value):
        raise ValueError("expected an address as host:port, such as 10.0.0.1:7420")
    return value


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
