"""Addresses of HTTP servers, as users write them. Standard library only."""

from __future__ import annotations

from urllib.parse import urlsplit


def parse_url(value: str) -> str:
    """The address without a slash at its end.

    Raises:
        ValueError: no http(s) address with a host, or one with a query, or with a user or password in it, which would end up
            in logs and results. The message does not repeat the address.
    """
    try:
        parts = urlsplit(value)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts = complete = None
    if not parts or not complete or any(letter.isspace() for letter in value):
        raise ValueError("expected an address such as http://127.0.0.1:30000")
    if parts.username is not None or parts.password is not None:
        raise ValueError("no user or password belongs into an address: keys are read from an environment variable")
    if parts.query or parts.fragment:
        raise ValueError("an address of a server ends before ? and #")
    return value.rstrip("/")


def parse_urls(values: list[str]) -> list[str]:
    """As `parse_url`, of each; ValueError also for an address that comes twice."""
    urls = [parse_url(value) for value in values]
    if len(set(urls)) < len(urls):
        raise ValueError("every address once: a server that comes twice would be given twice the work")
    return urls
