"""One served request: what it was, and what its server counted of it. A line of JSON each; read from engines' answers.

Names of fields are those of vLLM 0.32 and 0.33 (`vllm/v1/metrics/stats.py`, `--per-request-spec-decode-metrics`), SGLang
0.5.23 (`entrypoints/openai/protocol.py`, `managers/tokenizer_manager.py`) and llama.cpp b11434 (`timings` of its server).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from draftworks.errors import EngineError, StoreError

SCHEMA = 1
"""Stands in each line as `draftworks_request`, by which a line of ours is known."""
MARK = "draftworks_request"
ABORT = "abort"
Engine = Literal["vllm", "sglang", "llamacpp"]
ENGINES: tuple[Engine, ...] = ("vllm", "sglang", "llamacpp")
_LARGEST = 2**53
_LISTS = ("histogram", "per_pass")
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class RequestCounts:
    """What a server counted while it answered one request; of passes after the prefill, which gives the first token.

    Attributes:
        passes: passes of the target that verified a proposal; with llama.cpp all passes after the prefill.
        drafted: proposed tokens; None if the server does not say.
        accepted: accepted ones, without the target's own. Those that the last pass accepted beyond the answer's end are
            among them.
        histogram: entry n is the number of passes that accepted exactly n proposed tokens.
        per_pass: accepted tokens of each pass, in order.
    """

    passes: int
    drafted: int | None
    accepted: int
    histogram: tuple[int, ...] | None = None
    per_pass: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ServedRequest:
    """One request as it was served.

    Attributes:
        time: seconds since the epoch, when it ended.
        server: its name in the target's `servers:`, or host:port.
        model: as the answer names it.
        draft: digest or path of the draft; None if the server does not say.
        thinking: whether thoughts were asked for; None if that was left to the template.
        turn: number of the user's message in its chat, from 1.
        prompt_characters: of all messages before the answer.
        answers: how many were asked for (n).
        finish: stop, length, abort, or what else the server says.
        lossy: whether the rule of acceptance changes the output.
        passes, drafted, accepted, histogram, per_pass: see `RequestCounts`; None without counts.
        prompt: digest of what was asked, see `draftworks.production.asked`.
        text: request and answer, only where that is allowed.
        draftworks_request: the schema of the line that it was read from.
    """

    id: str
    time: Number
    server: str
    engine: str
    model: str | None = None
    draft: str | None = None
    weight_version: str | None = None
    source: str | None = None
    language: str | None = None
    thinking: bool | None = None
    turn: Count | None = None
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_characters: Count | None = None
    temperature: Number | None = None
    answers: Count = 1
    finish: str | None = None
    lossy: bool | None = None
    passes: Count | None = None
    drafted: Count | None = None
    accepted: Count | None = None
    histogram: tuple[Count, ...] | None = None
    per_pass: tuple[Count, ...] | None = None
    prompt: str | None = None
    text: dict[str, Any] | None = None
    draftworks_request: Literal[1] | None = field(default=None, repr=False, compare=False)
    __pydantic_config__ = ConfigDict(extra="forbid")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known, with the mark of the schema."""
        found = {each: getattr(self, each) for each in _NAMES}
        lists = {name: list(value) for name in _LISTS if (value := found[name]) is not None}
        return {name: value for name, value in {**found, **lists, MARK: SCHEMA}.items() if value is not None}

    def to_line(self) -> bytes:
        """Return the line of a log, with its end. Raises ValueError for a number that is not finite."""
        return json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False).encode() + b"\n"

    @classmethod
    def from_json(cls, values: Any) -> ServedRequest:
        """Return the request of a line's values.

        Raises:
            StoreError: it is none, is of another schema, or has a value that cannot be.
        """
        return cls.from_line(json.dumps(values).encode())

    @classmethod
    def from_line(cls, line: bytes) -> ServedRequest:
        """Return the request of a line. Raises StoreError as `from_json`, or if it is no JSON, as half a line is."""
        try:
            found = _ADAPTER.validate_json(line, strict=True)
        except ValidationError as error:
            wrong = error.errors(include_input=False)[0]
            raise StoreError(f"not a served request: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
        if found.draftworks_request is None:
            raise StoreError(f"not a served request: expected {MARK} {SCHEMA}, found none")
        return found

    @property
    def accepted_in_answer(self) -> int | None:
        """Accepted tokens that are part of the answer, as the walk counts them.

        A last pass may accept tokens beyond the end. With `completion_tokens` known they are those above
        completion_tokens - 1 - passes, since the prefill and each pass give one token of the target's own; the first
        token beyond is the target's own too.
        """
        if self.accepted is None or self.passes is None or self.completion_tokens is None:
            return self.accepted
        beyond = 1 + self.passes + self.accepted - self.completion_tokens
        return max(self.accepted - max(beyond - 1, 0), 0)


_ADAPTER = TypeAdapter(ServedRequest)
_NAMES = (MARK, *(each.name for each in fields(ServedRequest) if each.name != MARK))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def read_counts(engine: str, answer: Mapping[str, Any]) -> RequestCounts | None:
    """Return what a server counted of one request.

    Args:
        answer: a whole answer, or that object of a stream which has the counts, the last but `[DONE]`: of
            /v1/chat/completions, /v1/completions or SGLang's /generate.

    Returns:
        None where the server sent no counts of one answer: it does not speculate, was not asked to say it, the answer ended
        with the prefill, or there are several answers.

    Raises:
        EngineError: the counts contradict each other, or have another form.
    """
    try:
        return _READERS[engine](answer)
    except KeyError as error:
        raise EngineError(f"counts of a request of {engine}: expected {error.args[0]!r}, found none") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"counts of a request of {engine} have an unexpected form: {error}") from None


def _read_vllm(answer: Mapping[str, Any]) -> RequestCounts | None:
    found = (answer.get("metrics") or {}).get("speculative_decoding")
    if found is None:
        return None
    histogram = tuple(map(_count, found["acceptance_histogram"]))
    per_pass = found.get("per_step_accepted")
    drafted = found.get("num_draft_tokens")
    drafted = sum(map(_count, found["per_step_drafted"])) if drafted is None and per_pass else drafted
    return _check(
        _count(found["num_spec_steps"]),
        drafted,
        found.get("num_accepted_draft_tokens"),
        histogram,
        None if per_pass is None else tuple(map(_count, per_pass)),
    )


def _read_sglang(answer: Mapping[str, Any]) -> RequestCounts | None:
    found = (answer.get("sglext") or {}).get("spec_tokens_details")
    if isinstance(found, list):  # an entry for each of several answers
        found = found[0] if len(found) == 1 else None
    if found is None:
        found = answer.get("meta_info")
    if not found or not found.get("spec_verify_ct"):
        return None
    histogram = found.get("spec_correct_drafts_histogram")
    return _check(
        _count(found["spec_verify_ct"]),
        found.get("spec_num_proposed_drafts"),
        found["spec_num_correct_drafts"],
        tuple(map(_count, histogram)) if histogram else None,
    )


def _read_llamacpp(answer: Mapping[str, Any]) -> RequestCounts | None:
    """`predicted_n` tokens are one of the prefill, the accepted ones, and one of the target's own for each pass.

    Tokens beyond an end token are accepted and not predicted (`tools/server/server-context.cpp`), so an answer that ends with
    an accepted one has a pass too few; one that ends at its limit has none beyond.
    """
    found = answer.get("timings") or {}
    if not found.get("draft_n"):
        return None
    accepted = _count(found["draft_n_accepted"])
    return _check(_count(_count(found["predicted_n"]) - 1 - accepted), found["draft_n"], accepted)


_READERS = {"vllm": _read_vllm, "sglang": _read_sglang, "llamacpp": _read_llamacpp}


def _count(value: Any) -> int:
    if not _is_count(value):
        raise ValueError(f"expected a whole number of 0 or more, found {value!r}")
    return value


def _check(
    passes: int,
    drafted: Any,
    accepted: Any,
    histogram: tuple[int, ...] | None = None,
    per_pass: tuple[int, ...] | None = None,
) -> RequestCounts:
    """Return the counts if they agree with each other. Raises ValueError if not."""
    by_histogram = None if histogram is None else sum(n * count for n, count in enumerate(histogram))
    accepted = by_histogram if accepted is None else _count(accepted)
    if histogram is not None and (sum(histogram), by_histogram) != (passes, accepted):
        raise ValueError(f"{passes} passes with {accepted} accepted tokens contradict the histogram {histogram}")
    if per_pass is not None and (len(per_pass), sum(per_pass)) != (passes, accepted):
        raise ValueError(f"{passes} passes with {accepted} accepted tokens contradict {len(per_pass)} entries per pass")
    if drafted is not None and not accepted <= _count(drafted):
        raise ValueError(f"{accepted} tokens accepted of {drafted} proposed ones")
    return RequestCounts(passes, drafted, accepted, histogram, per_pass)


@dataclass(frozen=True)
class AnswerFacts:
    """What an answer says of its request, beside its text.

    Attributes:
        id: as the server numbers it.
        finish: of the first answer that says it; `error` where the server answered with one.
        answers: how many there are.
        problem: why the counts cannot be used.
    """

    id: str | None = None
    model: str | None = None
    weight_version: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str | None = None
    answers: int = 1
    counts: RequestCounts | None = None
    problem: str | None = None


def detect_engine(answer: Mapping[str, Any]) -> Engine | None:
    """Return whose answer it is by the fields that only one engine sends; None without any of them."""
    metrics = answer.get("metrics")
    if isinstance(metrics, Mapping) and "speculative_decoding" in metrics:
        return "vllm"
    if any(isinstance(answer.get(name), Mapping) for name in ("sglext", "meta_info")):
        return "sglang"
    timings = answer.get("timings")
    return "llamacpp" if isinstance(timings, Mapping) and "predicted_n" in timings else None


def read_answer(engine: str | None, objects: Iterable[Mapping[str, Any]]) -> AnswerFacts:
    """Return the facts of an answer: of one object, or of all objects of a stream in their order, the last that says it.

    Nothing is raised: what has another form is not known, and contradictory counts are a `problem`.

    Args:
        engine: None if it is not known, which leaves out the counts.
    """
    found: dict[str, Any] = {}
    choices: set[int] = set()
    for each in objects:
        found |= {name: value for name, value in _read_object(each).items() if value is not None}
        choices |= _number_choices(each)
        try:
            counts = None if engine is None else read_counts(engine, each)
        except EngineError as error:
            found["problem"] = str(error)
            continue
        found |= {} if counts is None else {"counts": counts}
    if "problem" in found:
        found["counts"] = None
    return AnswerFacts(**found, answers=max(len(choices), 1))


def _read_object(answer: Mapping[str, Any]) -> dict[str, Any]:
    meta, usage = _get(answer, "meta_info"), _get(answer, "usage")
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
    finish = first.get("finish_reason") or meta.get("finish_reason") or ("error" if answer.get("error") else None)
    finish = finish.get("type") if isinstance(finish, Mapping) else finish
    version = _get(answer, "metadata").get("weight_version") or meta.get("weight_version")
    texts = {"id": answer.get("id") or meta.get("id"), "model": answer.get("model"), "finish": finish}
    counts = {name: usage.get(name, meta.get(name)) for name in ("prompt_tokens", "completion_tokens")}
    return {
        **{name: value if isinstance(value, str) and value else None for name, value in texts.items()},
        **{name: value if _is_count(value) else None for name, value in counts.items()},
        "weight_version": None if version is None else str(version),
    }


def _get(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = answer.get(name)
    return found if isinstance(found, Mapping) else {}


def _number_choices(answer: Mapping[str, Any]) -> set[int]:
    choices = answer.get("choices")
    listed = choices if isinstance(choices, list) else []
    numbers = (each.get("index") if isinstance(each, Mapping) else None for each in listed)
    return {number if type(number) is int else place for place, number in enumerate(numbers)}
