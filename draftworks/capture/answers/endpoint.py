"""Answers from OpenAI-compatible servers that run the target (`responses.endpoint`).

With `token_ids` the server also returns the prompt's token ids. They have to equal those of the registry's tokenizer
and chat template, so that the training data is exactly what the target read and generated. Without `token_ids` the
answer is text, which is tokenized here and may give other tokens than the target generated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from http import HTTPStatus
from types import TracebackType
from typing import Any

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from draftworks.capture.answers.dialogue import Answerer, Dialogue
from draftworks.capture.answers.load_balancer import LoadBalancer
from draftworks.capture.engine import Generated, derive_seed
from draftworks.config.data import EndpointSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Turn
from draftworks.errors import CaptureError, ConfigError, EngineError
from draftworks.servers.client import CONNECT_TIMEOUT_S
from draftworks.storage.http_call import HttpClient

PATH = "/chat/completions"
_RETRYABLE = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS)
_PERMANENT = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


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
        self._http = HttpClient(
            base_url,
            timeout_s,
            {} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            connect_s=CONNECT_TIMEOUT_S,
            name=self._where,
            setting="endpoint.timeout_s",
            hidden={api_key: "***"} if api_key else {},
        )

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
        answer = self._http.call("POST", PATH, body)
        status = answer.status
        if status in _PERMANENT:
            raise ConfigError(
                f"{self._where} refused access ({status}): {answer.quoted}. Check base_urls, model and "
                "api_key_env of responses.endpoint"
            )
        if 400 <= status < 500 and status not in _RETRYABLE:
            raise CaptureError(f"{self._where} refused a request ({status}): {answer.quoted}")
        if not answer.is_success:
            raise EngineError(f"{self._where} failed ({status}): {answer.quoted}")
        try:
            return _parse_completion(answer.parse())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineError(
                f"{self._where}: expected a chat completion, found {answer.quoted} ({type(error).__name__})"
            ) from error

    @property
    def _where(self) -> str:
        return f"the endpoint {self.url}"


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


def build_request_fields(
    sampling: ResponseSpec,
    model: str,
    end_ids: Sequence[int],
) -> dict[str, Any]:
    """Return the fields that all requests have in common.

    Every option that a server supports is sent even where it is off, because the model's generation_config.json decides
    an option that is left out. OpenAI's penalties (presence and frequency) are added to logits; neither is equivalent
    to the multiplicative `repetition_penalty`, so no penalty is sent to an `openai` server.

    Args:
        sampling: its `endpoint` is set.
        end_ids: ids that end an answer.
    """
    endpoint = sampling.endpoint
    assert endpoint is not None
    fields: dict[str, Any] = {"model": model, "temperature": sampling.temperature, "top_p": sampling.top_p}
    if endpoint.server == "openai":
        return fields
    fields |= {
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(end_ids),
    }
    if endpoint.token_ids:
        fields["return_token_ids"] = True
    if endpoint.server == "sglang":
        fields["separate_reasoning"] = False
    return fields


def to_messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Return turns as messages of the chat completions API."""
    return [turn.to_message() for turn in turns]


_LONGEST_WAIT_S = 30.0

log = logging.getLogger(__name__)


class EndpointAnswerer(Answerer):
    """Answerer that sends each request to the least busy server of an endpoint.

    Args:
        sampling: its `endpoint` is set.
        max_length: largest number of tokens of prompt and answer together.
        environment: environment variables, which hold the API key.

    Raises:
        ConfigError: the API key's variable is not set, or its value cannot be a key.
    """

    concurrent = True

    def __init__(
        self,
        sampling: ResponseSpec,
        target: TargetFiles,
        chat: ChatTokenizer,
        max_length: int,
        environment: Mapping[str, str],
    ) -> None:
        assert sampling.endpoint is not None
        endpoint = sampling.endpoint
        key = _read_api_key(endpoint, environment)
        self._endpoint = endpoint
        self._sampling = sampling
        self._chat = chat
        self._max_length = max_length
        self._fields = build_request_fields(sampling, endpoint.model or target.model, chat.eos_ids)
        self._clients = [ChatClient(url, endpoint.timeout_s, key) for url in endpoint.base_urls]
        self._balancer = LoadBalancer({client.url: client for client in self._clients}, endpoint.max_outstanding)
        self._closed = False
        self._has_warned = False
        self.replicas = len(self._clients)

    def answer(self, dialogues: Sequence[Dialogue], turn: int) -> list[Generated]:
        return [self._answer(dialogue, turn) for dialogue in dialogues]

    def close(self) -> None:
        self._closed = True
        for client in self._clients:
            client.close()

    def _answer(self, dialogue: Dialogue, turn: int) -> Generated:
        limit = min(self._sampling.max_new_tokens, self._max_length - len(dialogue.ids))
        body = {**self._fields, "messages": to_messages(dialogue.turns), "max_tokens": limit}
        if dialogue.chat.template_options:
            body["chat_template_kwargs"] = dict(dialogue.chat.template_options)
        if self._sampling.temperature > 0:
            body["seed"] = derive_seed(self._sampling.seed, f"{turn}/{dialogue.id}")
        completion = self._complete(body)
        self._check_prompt(completion, dialogue)
        return self._to_generated(completion, dialogue, limit)

    def _complete(self, body: Mapping[str, Any]) -> Completion:
        retrying = Retrying(
            stop=stop_after_attempt(self._endpoint.attempts),
            wait=wait_exponential(max=_LONGEST_WAIT_S),
            retry=retry_if_exception(lambda error: isinstance(error, EngineError) and not self._closed),
            before=self._before_attempt,
            reraise=True,
        )
        return retrying(self._balancer.run, lambda client: client.complete(body))

    def _before_attempt(self, state: RetryCallState) -> None:
        if state.attempt_number > 1:
            self._balancer.reopen()  # all servers had failed, and the wait replaces the cool-down

    def _check_prompt(self, completion: Completion, dialogue: Dialogue) -> None:
        """Check that the target read the tokens that the draft will read.

        Raises:
            ConfigError: the server returned other prompt ids. If it returns only their number, a difference is logged
                once as a warning.
        """
        if completion.prompt_ids is not None:
            if list(completion.prompt_ids) != dialogue.ids and not _was_read_on_another_day(completion, dialogue):
                raise ConfigError(self._describe_difference(completion.prompt_ids, dialogue.ids))
        elif completion.prompt_tokens not in (None, len(dialogue.ids)) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the endpoint counts %s tokens in the prompt of conversation %s, the registry's tokenizer and chat "
                "template count %d: check that it serves this target and adds nothing to the messages",
                completion.prompt_tokens,
                dialogue.id,
                len(dialogue.ids),
            )

    def _describe_difference(self, found: Sequence[int], expected: Sequence[int]) -> str:
        first = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
        return (
            f"the endpoint renders a conversation as {len(found)} tokens, the registry's tokenizer and chat template "
            f"({self._chat.name}) as {len(expected)}; they differ from token {first} on, where the endpoint has "
            f"{self._chat.decode(found[first : first + 8])!r} and the registry "
            f"{self._chat.decode(expected[first : first + 8])!r}. Serve the same target with the same chat template"
        )

    def _to_generated(self, completion: Completion, dialogue: Dialogue, limit: int) -> Generated:
        if completion.finish not in ("stop", "length"):
            raise CaptureError(
                f"the endpoint ended an answer with {completion.finish!r}, which is not usable for training"
            )
        if (completion.completion_tokens or 0) > limit:
            raise ConfigError(
                f"the endpoint returned {completion.completion_tokens} tokens, expected at most {limit}: it ignores "
                "the field max_tokens"
            )
        if completion.finish == "length" and completion.token_ids is not None and len(completion.token_ids) < limit:
            raise ConfigError(
                f"the endpoint cut an answer after {len(completion.token_ids)} tokens, expected up to {limit}: it has a limit "
                "of its own. Raise its context and the max_new_tokens of its generation config, or lower "
                "responses.max_new_tokens"
            )
        ended = completion.finish == "stop"
        to_ids = self._take_ids if self._endpoint.token_ids else self._tokenize_text
        ids = to_ids(completion, dialogue, ended)
        return Generated(tuple(ids[:limit]), finished=ended and len(ids) <= limit)

    def _take_ids(self, completion: Completion, dialogue: Dialogue, ended: bool) -> list[int]:
        if completion.token_ids is None:
            raise ConfigError(
                "the endpoint returns no token ids. Set responses.endpoint.token_ids to false; labels are then the "
                "answer's text, tokenized again"
            )
        ids = list(completion.token_ids)
        if ended and (not ids or ids[-1] not in self._chat.eos_ids):
            return [*ids, *dialogue.chat.encode_closing([*dialogue.turns, Turn("assistant", "")])]
        return ids

    def _tokenize_text(self, completion: Completion, dialogue: Dialogue, ended: bool) -> list[int]:
        if completion.reasoning:
            raise ConfigError(
                "the endpoint removes the reasoning from its answers, with the tokens around it: start the server "
                "without a reasoning parser, or set responses.endpoint.token_ids to true"
            )
        return dialogue.chat.encode_answer([*dialogue.turns, Turn("assistant", completion.text)], ended)


def _was_read_on_another_day(completion: Completion, dialogue: Dialogue) -> bool:
    """Whether the prompt differs by the day alone on which the server rendered it; the dialogue then has that day."""
    if not dialogue.chat.prints_date or completion.prompt_ids is None:
        return False
    today = datetime.combine(datetime.now().date(), time())
    days = (today, today - timedelta(days=1), today + timedelta(days=1))  # other time zones, a midnight in between
    return any(dialogue.read_on_date(completion.prompt_ids, day) for day in days)


def _read_api_key(endpoint: EndpointSpec, environment: Mapping[str, str]) -> str | None:
    if endpoint.api_key_env is None:
        return None
    key = environment.get(endpoint.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"the environment variable {endpoint.api_key_env} (responses.endpoint.api_key_env) is not set where "
            "answers are generated: set it for the Dagster process"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the environment variable {endpoint.api_key_env} (responses.endpoint.api_key_env) has characters that no "
            "API key has: expected one line of printable ASCII without spaces"
        )
    return key
