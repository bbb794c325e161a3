"""One POST of JSON with a time limit for the whole answer; the address can be kept out of every message and log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from draftworks.config.service import is_loopback

MAX_ANSWER_BYTES = 1 << 16


class Posted(NamedTuple):
    """What a server has answered. `problem` is why the attempt failed; empty if it did not."""

    text: str
    problem: str = ""
    status: int | None = None
    retry_after_s: float | None = None


def post_json(
    url: str, payload: bytes, headers: Mapping[str, str], timeout_s: float, shown_as: str | None = None
) -> Posted:
    """Send JSON, and return the answer; redirects are not followed, and proxies of the environment are used.

    Args:
        shown_as: what stands for the address in problems, where it contains a token; httpx does not log it then.
    """
    import httpx

    where = url if shown_as is None else shown_as
    deadline, body = time.monotonic() + timeout_s, b""
    headers = {"Content-Type": "application/json", **headers}
    try:
        with (
            _keep_out_of_logs(shown_as is not None),
            httpx.Client(timeout=timeout_s, trust_env=not is_loopback(url), follow_redirects=False) as client,
            client.stream("POST", url, content=payload, headers=headers) as response,
        ):
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    return Posted("", f"{where}: an answer of more than {MAX_ANSWER_BYTES:,} bytes")
                if time.monotonic() > deadline:
                    return Posted("", f"{where}: no whole answer within {timeout_s:g} s")
            text = body.decode(errors="replace")
            if shown_as is not None:
                text = text.replace(url, shown_as)
            wait_s = _parse_seconds(response.headers.get("Retry-After"))
            said = (
                text.strip() or f"{response.reason_phrase or 'no reason'}, and nothing else was said: look into its log"
            )
            problem = "" if response.is_success else f"{where}: it answers {response.status_code}: {said}"
            return Posted(text, problem, response.status_code, wait_s)
    except httpx.TimeoutException:
        return Posted("", f"{where}: no answer within {timeout_s:g} s")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        said = str(error) if shown_as is None else str(error).replace(url, shown_as)
        return Posted("", f"{where}: cannot be reached: {type(error).__name__}: {said}")


def _parse_seconds(value: str | None) -> float | None:
    """Return a Retry-After header's seconds; None for a date, or nonsense."""
    return float(value) if value is not None and value.isdecimal() and len(value) < 8 else None


class _Nothing(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return False


@contextmanager
def _keep_out_of_logs(secret: bool) -> Iterator[None]:
    """Context in which httpx logs no request, since its lines have the whole address."""
    quiet = _Nothing()
    if secret:
        logging.getLogger("httpx").addFilter(quiet)
    try:
        yield
    finally:
        logging.getLogger("httpx").removeFilter(quiet)
