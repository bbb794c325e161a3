"""Client of an engine's HTTP interface: what is the same for all engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, ClassVar, Self

from draftworks.errors import CaptureError, EngineError, PassingTroubleError
from draftworks.servers.environment import EngineSoftware
from draftworks.servers.start import build_headers
from draftworks.storage.http_call import HttpClient, NoAnswerError

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class SpeculatedAnswer:
    """An answer with the counters of accepted tokens of its request.

    Attributes:
        passes: number of passes of the target after the prefill, which gives the first token.
        histogram: entry n is the number of passes that accepted exactly n proposed tokens. It includes tokens that the
            last pass accepted beyond the answer's end, which `output_ids` does not.
        last_accepted: what the last pass accepted; None if the server does not say.
    """

    output_ids: tuple[int, ...]
    passes: int
    histogram: tuple[int, ...]
    last_accepted: int | None = None

    def list_accepted_per_pass(self) -> list[int]:
        """Return the number of accepted tokens of each pass, in no particular order.

        Tokens that the last pass accepted beyond the answer's end are not counted. Where the server does not say what the
        last pass accepted, it is assumed to be one of those that accepted most. The sum is therefore exact, but one entry
        may not be.
        """
        accepted = sorted(n for n, passes in enumerate(self.histogram) for _ in range(passes))
        beyond = 1 + sum(accepted) + self.passes - len(self.output_ids)
        if accepted and beyond > 1:  # the first token beyond is the target's own, not a proposed one
            last = accepted.pop() if self.last_accepted is None else accepted.pop(accepted.index(self.last_accepted))
            accepted.append(last - (beyond - 1))
        return accepted


@dataclass(frozen=True)
class Counters:
    """Counters of a server since its start.

    Attributes:
        passes: number of verifying passes of the target, counted once for each request in the pass.
        tokens: number of generated tokens.
    """

    passes: int
    tokens: int

    def subtract(self, before: Counters) -> Counters:
        return Counters(self.passes - before.passes, self.tokens - before.tokens)


@dataclass(frozen=True)
class GenerateRequest:
    """A prompt with sampling parameters for it, under the names of the software that it is for."""

    request_id: str
    input_ids: Sequence[int]
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Generation:
    """The answer of an engine to a prompt.

    Attributes:
        finish: why it ended: `stop` (an end token, which is part of `output_ids`) or `length`.
        cached_tokens: number of tokens of the prompt that were found in the prefix cache and not computed.
        logits: (V,), for the first token of the answer; None if not requested, or handed over with hidden states.
    """

    output_ids: tuple[int, ...]
    finish: str
    cached_tokens: int
    logits: Sequence[float] | None = None


class EngineClient:
    """Client of one server, for any number of threads.

    Raises (all methods):
        EngineError: no connection, no answer in time, or an error of the server.
        CaptureError: the server refuses a request (too long, for example).

    Args:
        key: the server's API key; None for a server without one.
    """

    SOFTWARE: ClassVar[EngineSoftware]

    def __init__(self, url: str, timeout_s: float, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = HttpClient(
            self.url,
            timeout_s,
            build_headers(key),
            connect_s=CONNECT_TIMEOUT_S,
            name=self._where,
            setting=f"{self.SOFTWARE.key}.request_timeout_s of the deployment",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def require_reachable(self) -> None:
        """Raise EngineError if the server cannot be connected to; a busy one may take its time to answer."""
        try:
            self._http.call("GET", "/health", timeout_s=CONNECT_TIMEOUT_S)
        except NoAnswerError as error:
            if not error.timed_out:
                raise

    @property
    def _where(self) -> str:
        return f"{self.SOFTWARE.name} at {self.url}"

    def _get_metrics(self) -> str:
        """Return the answer of /metrics, in Prometheus' text format."""
        answer = self._http.call("GET", "/metrics")
        if not answer.is_success:
            raise EngineError(f"{self._where} sent no metrics ({answer.status}): {answer.quoted}")
        return answer.text

    def _call_for_object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        found = self._call(method, path, body)
        if not isinstance(found, dict):
            raise EngineError(f"{self._where}: {path}: expected a JSON object, found {str(found)[:200]}")
        return found

    def _tokenize(self, body: Mapping[str, Any]) -> list[int]:
        found = self._call_for_object("POST", "/tokenize", body).get("tokens")
        if not isinstance(found, list):
            raise EngineError(f"{self._where}: /tokenize: expected a list of tokens, found {str(found)[:200]}")
        return found

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        answer = self._http.call(method, path, body)
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise PassingTroubleError(f"{self._where} is overloaded ({path}, 429): {answer.quoted}")
        if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise EngineError(f"{self._where} refused our key, or wants one ({path}, {answer.status})")
        if 400 <= answer.status < 500:
            raise CaptureError(f"{self._where} refused {path} ({answer.status}): {answer.quoted}")
        if not answer.is_success:
            raise EngineError(f"{self._where} failed on {path} ({answer.status} {answer.reason}): {answer.quoted}")
        try:
            return answer.parse()
        except ValueError as error:
            raise EngineError(f"{self._where} failed on {path}: {error}: {answer.quoted}") from error


@dataclass(frozen=True)
class Sampling:
    """How a server chooses the tokens of one answer.

    Attributes:
        stop_ids: tokens that end it, and are part of it.
        seed: of a sampled answer; None leaves it to the server.
    """

    max_new_tokens: int
    stop_ids: Sequence[int] = ()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
