"""One POST of JSON; a failure is a text, from which the address can be kept out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from draftworks.storage.http_call import HttpClient, NoAnswerError

MAX_ANSWER_BYTES = 1 << 16


class Posted(NamedTuple):
    """The answer of a server. `problem` is why the attempt failed; empty if it did not."""

    text: str
    problem: str = ""
    status: int | None = None
    retry_after_s: float | None = None


def post_json(
    url: str, payload: bytes, headers: Mapping[str, str], timeout_s: float, shown_as: str | None = None
) -> Posted:
    """Send JSON, and return the answer; redirects are not followed, and proxies of the environment are used.

    Args:
        shown_as: what stands for the address in problems, where it contains a token.
    """
    name = url if shown_as is None else shown_as
    try:
        with HttpClient(url, timeout_s, headers, name=name, hidden={url: name}) as http:
            answer = http.call("POST", body=payload, max_bytes=MAX_ANSWER_BYTES)
    except NoAnswerError as error:
        return Posted("", str(error))
    said = answer.text.strip() or f"{answer.reason or 'no reason'}, and nothing else was said: look into its log"
    problem = "" if answer.is_success else f"{name}: it answers {answer.status}: {said}"
    return Posted(answer.text, problem, answer.status, _parse_seconds(answer.headers.get("retry-after")))


def _parse_seconds(value: str | None) -> float | None:
    """Return a Retry-After header's seconds; None for a date, or nonsense."""
    return float(value) if value is not None and value.isdecimal() and len(value) < 8 else None
