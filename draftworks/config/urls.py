"""Validation of the addresses of servers. Standard library only."""

from __future__ import annotations

from urllib.parse import urlsplit


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
