"""HTTP calls with a limit on the time and the size of the whole answer; no secret gets into a message or a log."""

from __future__ import annotations

import ipaddress
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from draftworks.errors import EngineError
from draftworks.storage.files import parse_json

MAX_ANSWER_BYTES = 256 << 20
MAX_ERROR_BYTES = 1 << 16
"""Read of an answer that says an error: enough for its message."""
MAX_QUOTED_CHARACTERS = 500


class NoAnswerError(EngineError):
    """No whole answer came; the words say why. `timed_out` is whether it was only late."""

    timed_out = False


@dataclass(frozen=True)
class HttpAnswer:
    """A whole answer of a server; of an error answer its first 64 KiB.

    Attributes:
        headers: names in lower case.
        hidden: see `HttpClient`.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes
    hidden: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The content for people, without secrets."""
        return _hide(self.content.decode(errors="replace"), self.hidden)

    @property
    def quoted(self) -> str:
        """The begin of `text`, for a message."""
        return self.text[:MAX_QUOTED_CHARACTERS]

    def parse(self) -> Any:
        """Return the content's JSON. Raises ValueError as `parse_json`."""
        return parse_json(self.content)


class HttpClient:
    """Calls of one server, for any number of threads and connections; follows no redirects.

    Args:
        url: what every address begins with. Proxies of the environment are used unless it is on this machine.
        timeout_s: for a whole answer. `connect_s` is for the connection, by default the same.
        name: what stands for the server in messages.
        setting: where a user sets `timeout_s`, for messages.
        hidden: secrets, such as a key, with what stands for each in messages.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        *,
        connect_s: float | None = None,
        name: str = "",
        setting: str = "",
        hidden: Mapping[str, str] | None = None,
    ) -> None:
        import httpx

        logging.getLogger("httpx").addFilter(_is_problem)  # it would log every request, with the whole address
        self.url = url
        self._timeout_s, self._connect_s = timeout_s, timeout_s if connect_s is None else min(timeout_s, connect_s)
        self._name, self._setting = name, f" ({setting})" if setting else ""
        self._hidden = hidden or {}
        self._http = httpx.Client(
            headers={"Accept-Encoding": "identity", **(headers or {})},
            limits=httpx.Limits(max_connections=None),  # callers decide how many calls run together
            trust_env=not is_loopback(url),
            # Plain http on this machine has no certificate, and to load the authorities takes 20 ms of processor time.
            verify=not (is_loopback(url) and urlsplit(url).scheme == "http"),
        )

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        path: str = "",
        body: bytes | Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> HttpAnswer:
        """Send a request, with a body of JSON or none, and return the answer, whatever its status.

        Raises:
            NoAnswerError: no connection, no whole answer in time, or one of more than `max_bytes`.
        """
        import httpx

        if self._http.is_closed:
            raise self._explain(path, "cannot be used any more: its client was closed")
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        times = httpx.Timeout(limit_s, connect=min(limit_s, self._connect_s))
        sent = json.dumps(body).encode() if isinstance(body, Mapping) else body
        headers = {} if sent is None else {"Content-Type": "application/json"}
        deadline, content = time.monotonic() + limit_s, bytearray()
        try:
            with self._http.stream(
                method, f"{self.url}{path}", content=sent, headers=headers, timeout=times
            ) as response:
                for chunk in response.iter_bytes():
                    content += chunk
                    if time.monotonic() > deadline:
                        raise self._explain(path, f"no whole answer within {limit_s:g} s{self._setting}")
                    if not response.is_success:
                        if len(content) > MAX_ERROR_BYTES:
                            break
                    elif len(content) > max_bytes:
                        raise self._explain(path, f"an answer of more than {max_bytes:,} bytes")
        except httpx.TimeoutException:
            late = self._explain(path, f"no answer within {limit_s:g} s{self._setting}")
            late.timed_out = True
            raise late from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._explain(path, f"cannot be reached: {type(error).__name__}: {error}") from None
        return HttpAnswer(
            response.status_code, response.reason_phrase, dict(response.headers), bytes(content), self._hidden
        )

    def _explain(self, path: str, problem: str) -> NoAnswerError:
        return NoAnswerError(_hide(": ".join(filter(None, (self._name, path, problem))), self._hidden))


def is_loopback(url: str) -> bool:
    """Whether the host of an address is this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hide(text: str, hidden: Mapping[str, str]) -> str:
    for secret, shown in hidden.items():
        text = text.replace(secret, shown)
    return text


def _is_problem(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


MAX_POST_ANSWER_BYTES = 1 << 16


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
            answer = http.call("POST", body=payload, max_bytes=MAX_POST_ANSWER_BYTES)
    except NoAnswerError as error:
        return Posted("", str(error))
    said = answer.text.strip() or f"{answer.reason or 'no reason'}, and nothing else was said: look into its log"
    problem = "" if answer.is_success else f"{name}: it answers {answer.status}: {said}"
    return Posted(answer.text, problem, answer.status, _parse_seconds(answer.headers.get("retry-after")))


def _parse_seconds(value: str | None) -> float | None:
    """Return a Retry-After header's seconds; None for a date, or nonsense."""
    return float(value) if value is not None and value.isdecimal() and len(value) < 8 else None
