"""What the proxy saw of one request, and the line that is made of it, in the writing thread."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftworks.data.served.secrets import find_secret, mask_text
from draftworks.data.served.shapes import MAX_SOURCE_LENGTH, is_unicode
from draftworks.production.asked import AskedFacts, read_asked
from draftworks.production.requests import ABORT, AnswerFacts, ServedRequest, detect_engine, read_answer
from draftworks.production.serving_facts import ServingFacts
from draftworks.recording.answer_pieces import AnswerPieces

BROKEN = "error"
"""`finish` of a request whose answer the server broke off."""
UNKNOWN_ENGINE = "unknown"
ALWAYS_MASKED = ("email", "secret")
_OK = 200
_TOLD_AFTER = 5
_PARSED_BYTES = 4
"""About what a byte of a body takes when it is parsed and held."""
HINTS = {
    "vllm": "start vLLM with --per-request-spec-decode-metrics summary",
    "sglang": "does it run with a draft? SGLang says its counts where it speculates",
    "llamacpp": "does it run with a draft? llama.cpp says draft_n where it speculates",
    UNKNOWN_ENGINE: "the server does not say which engine it is: give --engine",
}


@dataclass
class SeenRequest:
    """What was seen of a request while it passed; never a header but that of the source.

    Attributes:
        values: what its body asks for; None if it was not read.
        facts: of the server when the request began.
        source: as the client wrote it.
        pieces: of its answer; None before that begins.
        ended_by: why there is no whole answer: the client went, or the server broke it off.
        time: seconds since the epoch, of its end.
    """

    path: str
    values: Mapping[str, Any] | None
    body_bytes: int
    facts: ServingFacts
    source: str | None = None
    status: int | None = None
    pieces: AnswerPieces | None = None
    ended_by: str | None = None
    time: float = 0.0

    @property
    def was_served(self) -> bool:
        """Whether it is a request that a server answered, or would have: not one that was refused or never arrived."""
        return self.status == _OK or (self.status is None and self.ended_by == ABORT)

    @property
    def nbytes(self) -> int:
        return _PARSED_BYTES * self.body_bytes + (0 if self.pieces is None else self.pieces.nbytes)


@dataclass
class LineMaker:
    """Makes lines of seen requests, for one thread.

    Attributes:
        server: name of the server in the lines.
        text: kinds of what is masked in texts (`mask_text`); None leaves texts out.
        draft: of the server, where it does not say it.
        tell: is told once if the server sends no counts.
    """

    server: str
    tell: Callable[[str], None]
    text: Sequence[str] | None = None
    draft: str | None = None
    counted: int = 0
    uncounted: int = field(default=0)

    def make(self, seen: SeenRequest) -> bytes:
        """Return the line of a request. Raises ValueError for a number that no line can have."""
        objects = [] if seen.pieces is None else seen.pieces.read_objects()
        engine = seen.facts.engine or next(filter(None, map(detect_engine, objects)), None) or UNKNOWN_ENGINE
        answer = AnswerFacts() if engine == UNKNOWN_ENGINE and not objects else read_answer(engine, objects)
        asked = AskedFacts() if seen.values is None else read_asked(seen.values)
        answers = max(asked.answers * _count_prompts(seen.values or {}), answer.answers)
        counts = answer.counts if answers == 1 else None
        thoughts = seen.pieces is not None and asked.thinking is None and seen.pieces.has_thoughts
        request = ServedRequest(
            id=answer.id or f"record-{uuid.uuid4().hex}",
            time=seen.time,
            server=self.server,
            engine=engine,
            model=answer.model or _find_text(seen.values or {}, "model"),
            draft=seen.facts.draft or self.draft,
            weight_version=answer.weight_version or seen.facts.weight_version,
            source=_clean_source(seen.source),
            language=asked.language,
            thinking=True if thoughts else asked.thinking,
            turn=asked.turn,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            prompt_characters=asked.prompt_characters,
            temperature=asked.temperature,
            answers=answers,
            finish=seen.ended_by or answer.finish,
            lossy=seen.facts.lossy,
            **({} if counts is None else vars(counts)),
            prompt=asked.prompt,
            text=None if self.text is None or seen.values is None else mask_asked(seen.values, self.text),
        )
        self._count(request, answer)
        return request.to_line()

    def _count(self, request: ServedRequest, answer: AnswerFacts) -> None:
        """Tell once what to do about a server none of whose answers has counts."""
        if request.passes is not None:
            self.counted += 1
        elif request.finish not in (ABORT, BROKEN) and request.answers == 1 and request.completion_tokens != 1:
            self.uncounted += 1
            if self.uncounted == _TOLD_AFTER and not self.counted:
                why = answer.problem or HINTS[request.engine]
                self.tell(
                    f"the first {_TOLD_AFTER} answers of {self.server} have no counts of speculative decoding: {why}"
                )


def mask_asked(values: Mapping[str, Any], kinds: Iterable[str]) -> dict[str, Any] | None:
    """Return what a request asks with its secrets masked: `messages`, or `prompt`; None where that cannot be relied on.

    That is the case of what is no text, and of a text in which a known kind of secret is left.
    """
    messages = values.get("messages")
    if isinstance(messages, list):
        said = [_find_said(each) for each in messages]
        texts = [text for _, text in said]
    else:
        said, texts = [], [values.get("prompt", values.get("text"))]
    if not texts or not all(isinstance(text, str) and is_unicode(text) for text in texts):
        return None
    masked = [mask_text(str(text), kinds).text for text in texts]
    if find_secret(masked) is not None:
        return None
    if not said:
        return {"prompt": masked[0]}
    return {"messages": [{"role": role, "content": text} for (role, _), text in zip(said, masked)]}


def _find_said(message: Any) -> tuple[str, str | None]:
    """Return role and text of a message; no text where it has more than that."""
    if not isinstance(message, Mapping) or message.get("tool_calls"):
        return "", None
    content, role = message.get("content"), message.get("role")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
    return (role, content) if isinstance(role, str) and isinstance(content, str) else ("", None)


def _count_prompts(values: Mapping[str, Any]) -> int:
    """Return the number of prompts in one request of completions."""
    prompt = next((values[name] for name in ("prompt", "input_ids", "text") if values.get(name) is not None), None)
    if (
        "messages" in values
        or not isinstance(prompt, list)
        or not all(isinstance(each, (str, list)) for each in prompt)
    ):
        return 1
    return max(len(prompt), 1)


def _clean_source(value: str | None) -> str | None:
    """Return a source that may stand in a line: short, without what looks like a secret."""
    if value is None or not value.strip() or not is_unicode(value):
        return None
    return mask_text(value.strip(), ALWAYS_MASKED).text[:MAX_SOURCE_LENGTH]


def _find_text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    return value if isinstance(value, str) and value else None
