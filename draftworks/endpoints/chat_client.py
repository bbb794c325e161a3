"""Client of the part of an OpenAI-compatible server's `/chat/completions` that Draftworks uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from draftworks.errors import CaptureError, ConfigError, EngineError
from draftworks.sglang.client import CONNECT_TIMEOUT_S

MAX_QUOTED_CHARACTERS = 500
"""Maximum number of characters of a server's message that an error message quotes."""
PATH = "/chat/completions"
_RETRYABLE = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.CONFLICT, httpx.codes.TOO_MANY_REQUESTS)
_PERMANENT = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND)


@dataclass(frozen=True)
class Completion:
    """A server's answer to one chat request.

    Attributes:
        text: text of the answer.
        reasoning: reasoning text that the server separated from the answer; empty if there is none.
        finish: the server's finish reason: `stop`, `length`, or another one, with which the answer is not usable.
        token_ids: token ids of the answer; None if the server did not send them.
        prompt_ids: token ids of the prompt as the server rendered it; None if the server did not send them.
        prompt_tokens, completion_tokens: numbers of tokens; None if the server did not send them.
    """

    text: str
    reasoning: str
    finish: str
    token_ids: tuple[int, ...] | None
    prompt_ids: tuple[int, ...] | None
    prompt_tokens: int | None
    completion_tokens: int | None


class ChatClient:
    """Client of one server, for any number of threads. Error messages do not contain the API key.

    Args:
        base_url: URL up to and including `/v1`.
        api_key: sent as a bearer token.
    """

    def __init__(self, base_url: str, timeout_s: float, api_key: str | None = None) -> None:
        self.url = base_url
        self._timeout_s = timeout_s
        self._key = api_key
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(timeout=timeout, limits=httpx.Limits(max_connections=None), headers=headers)

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def complete(self, body: Mapping[str, Any]) -> Completion:
        """Send a request body and return the server's answer.

        Raises:
            ConfigError: the key is refused, or the model or address does not exist.
            CaptureError: the server refuses this request.
            EngineError: no connection, no answer in time, too busy, an error of the server, or an answer of another
                form.
        """
        response = self._send(body)
        status = response.status_code
        if status in _PERMANENT:
            raise ConfigError(
                f"{self._where} refused access ({status}): {self._format_body(response)}. Check base_urls, model and "
                "api_key_env of responses.endpoint"
            )
        if response.is_client_error and status not in _RETRYABLE:
            raise CaptureError(f"{self._where} refused a request ({status}): {self._format_body(response)}")
        if not response.is_success:
            raise EngineError(f"{self._where} failed ({status}): {self._format_body(response)}")
        try:
            return _parse_completion(response.json())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineError(
                f"{self._where}: expected a chat completion, found {self._format_body(response)} "
                f"({type(error).__name__})"
            ) from error

    @property
    def _where(self) -> str:
        return f"the endpoint {self.url}"

    def _send(self, body: Mapping[str, Any]) -> httpx.Response:
        if self._http.is_closed:
            raise EngineError(f"{self._where} cannot be used any more: its client was closed")
        try:
            return self._http.post(f"{self.url}{PATH}", json=body)
        except httpx.TimeoutException as error:
            raise EngineError(
                f"{self._where} did not answer within {self._timeout_s:g} s (endpoint.timeout_s)"
            ) from error
        except httpx.HTTPError as error:
            reason = self._redact_key(f"{type(error).__name__}: {error}")
            raise EngineError(f"{self._where} cannot be reached: {reason}") from None

    def _format_body(self, response: httpx.Response) -> str:
        return self._redact_key(response.text)[:MAX_QUOTED_CHARACTERS]

    def _redact_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _parse_completion(body: dict[str, Any]) -> Completion:
    """Return the `Completion` in an answer; SGLang and vLLM send token ids under different names and places."""
    choice = body["choices"][0]
    message, usage = choice["message"], body.get("usage") or {}
    return Completion(
        text=message.get("content") or "",
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        finish=str(choice.get("finish_reason")),
        token_ids=_take_first_ids(choice.get("response_token_ids"), choice.get("token_ids")),
        prompt_ids=_take_first_ids(choice.get("prompt_token_ids"), body.get("prompt_token_ids")),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
    )


def _take_first_ids(*found: list[int] | None) -> tuple[int, ...] | None:
    return next((tuple(map(int, ids)) for ids in found if ids is not None), None)
