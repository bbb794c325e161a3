"""What a request asks, by its body: the columns of its slices, and a digest by which an eval prompt is found again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftworks.data.formats import OPENAI_ROLES, TOOL_KEYS
from draftworks.data.served.shapes import DEFAULT, ON, find_source, find_thinking
from draftworks.data.slices import detect_language
from draftworks.storage.identity import digest, token_digest

LARGEST_ID = 2**31 - 1


@dataclass(frozen=True)
class AskedFacts:
    """The fields of a `ServedRequest` that its body decides.

    Attributes:
        thinking: None if the request leaves it to the template.
        turn: number of the last message of the user; None without messages.
        prompt_characters: of all messages; None for tokens.
        temperature: None if the request leaves it to the server.
        prompt: see `digest_messages`, `digest_text` and `token_digest`; None for several prompts in one request.
    """

    source: str | None = None
    language: str | None = None
    thinking: bool | None = None
    turn: int | None = None
    prompt_characters: int | None = None
    temperature: float | None = None
    answers: int = 1
    prompt: str | None = None


def read_asked(
    body: Mapping[str, Any], row: Mapping[str, Any] | None = None, source_field: str | None = None
) -> AskedFacts:
    """Return what a body of /v1/chat/completions, /v1/completions or SGLang's /generate asks.

    What has another form is not known; nothing is raised.

    Args:
        row: the line of a log that holds the body.
        source_field: dotted path of the field that names the source, in the row or in the body.
    """
    row = {} if row is None else row
    sampling = body.get("sampling_params")
    options = sampling if isinstance(sampling, Mapping) else body
    temperature, answers = options.get("temperature"), options.get("n")
    thinking = find_thinking(body, row)
    known = {
        "source": find_source(row, body, source_field),
        "thinking": None if thinking == DEFAULT else thinking == ON,
        "temperature": _to_number(temperature),
        "answers": answers if type(answers) is int and answers > 0 else 1,
    }
    return AskedFacts(**known, **_read_prompt(body))


def _read_prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    if isinstance(messages, list) and all(isinstance(each, Mapping) for each in messages):
        said = [_Message.of(each) for each in messages]
        return {
            "language": detect_language("\n".join(each.text for each in said if each.role == "user")),
            "turn": sum(each.role == "user" for each in said) or None,
            "prompt_characters": sum(len(each.text) for each in said),
            "prompt": _digest_said(said, body),
        }
    prompt = next((body[name] for name in ("prompt", "input_ids", "text") if body.get(name) is not None), None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        [prompt] = prompt
    if isinstance(prompt, str):
        return {
            "language": detect_language(prompt),
            "prompt_characters": len(prompt),
            "prompt": digest_text(prompt),
        }
    return {"prompt": token_digest(prompt)} if isinstance(prompt, list) and _are_tokens(prompt) else {}


@dataclass(frozen=True)
class _Message:
    """A message as a digest sees it; `plain` if it has text alone."""

    role: str
    text: str
    plain: bool

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> _Message:
        role, content = message.get("role"), message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
        known = [text for text in texts if isinstance(text, str)]
        plain = len(known) == len(parts) and not any(message.get(key) for key in TOOL_KEYS)
        role = OPENAI_ROLES.get(role, role) if isinstance(role, str) else ""
        return cls(role, "".join(known), plain and role != "tool")


def _digest_said(said: Sequence[_Message], body: Mapping[str, Any]) -> str | None:
    """Return the digest of messages; None where there is more to them than text, so that they are no eval prompt."""
    if not all(each.plain for each in said) or any(body.get(key) for key in TOOL_KEYS):
        return None
    return digest_messages((each.role, each.text) for each in said)


def digest_messages(messages: Iterable[tuple[str, str]]) -> str:
    """Return the digest of messages, as role and text: equal for a chat request and the turns of an eval set's prompt."""
    return digest(["messages", [list(each) for each in messages]])


def digest_text(text: str) -> str:
    """Return the digest of a prompt that is no chat."""
    return digest(["text", text])


def _are_tokens(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and all(type(each) is int and 0 <= each <= LARGEST_ID for each in prompt)


def _to_number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < float("inf") else None
