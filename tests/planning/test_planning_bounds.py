"""Amounts of a plan beside those that come: data of many kinds goes through the embedded target's tokenizer, and scripts answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from answer_toys import answering_run
from planning_toys import PlannedTarget
from thinking import THINKING_TEMPLATE

from draftworks.capture.answers.answer_sets import open_kept_answers
from draftworks.capture.answers.dialogue import Answerer, Dialogue
from draftworks.capture.answers.regenerate import regenerate_with
from draftworks.capture.engine import Generated
from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import read_conversations
from draftworks.data.prepare import prepare_conversations, tokenize_part
from draftworks.planning.estimates import Estimate
from draftworks.planning.kept_answers import measure_records

ROWS, MAX_LENGTH, NEW_TOKENS = 60, 400, 48
WORDS = [
    "the",
    "list",
    "of",
    "names",
    "is",
    "read",
    "from",
    "a",
    "file",
    "that",
    "holds",
    "one",
    "value",
    "for",
    "each",
    "line",
    "and",
    "returns",
    "what",
    "it",
    "found",
    "there",
]
THOUGHT = "<think>\n{}\n</think>\n\n{}"
Length = Callable[[random.Random], int]


def say(chooser: random.Random, words: int) -> str:
    return " ".join(chooser.choice(WORDS) for _ in range(words)).capitalize() + "."


@dataclass(frozen=True)
class Kind:
    """Data and what the target says to it.

    Attributes:
        words: of a question, and of an answer of the data; no answer where that is None.
        tokens: of an answer of the target; the limit where that is None.
        ordered: short rows come first.
    """

    words: Length
    given: Length | None = None
    tokens: Length | None = None
    exchanges: int = 1
    thought: Length | None = None
    mode: str = "regenerate"
    ordered: bool = False
    speak: Callable[[random.Random, int], str] = say
    entry: dict[str, Any] = field(default_factory=dict)

    def make_rows(self, count: int) -> list[dict[str, Any]]:
        chooser, rows = random.Random(3), list[dict[str, Any]]()
        for number in range(count):
            messages: list[dict[str, str]] = []
            for turn in range(self.exchanges):
                asked = f"{number} {self.speak(chooser, self.words(chooser))}"
                messages.append({"role": "user", "content": asked})
                if self.given is not None:
                    said = self.speak(chooser, self.given(chooser))
                    thought = None if self.thought is None else self.speak(chooser, self.thought(chooser))
                    said = said if thought is None else THOUGHT.format(thought, said)
                    messages.append({"role": "assistant", "content": said})
                elif turn + 1 < self.exchanges:
                    messages.append({"role": "assistant", "content": "Well."})
            rows.append({"messages": messages})
        return sorted(rows, key=lambda row: len(json.dumps(row))) if self.ordered else rows


def between(low: int, high: int) -> Length:
    return lambda chooser: chooser.randint(low, high)


def either(*lengths: int) -> Length:
    return lambda chooser: chooser.choice(lengths)


def say_in_russian(chooser: random.Random, words: int) -> str:
    return " ".join(chooser.choice(["слово", "файл", "чтение", "строка"]) for _ in range(words))


def write_code(chooser: random.Random, words: int) -> str:
    return "\n".join(f"    if x[{chooser.randint(0, 99)}] == {{'a': {n}}}:" for n in range(words // 4 + 1))


KINDS = {
    "prompts only, cut answers": Kind(between(5, 30)),
    "prompts only, one word each": Kind(between(1, 3), tokens=either(2, 3)),
    "long answers in the data, short ones of the target": Kind(between(5, 20), between(60, 120), tokens=either(3, 5)),
    "short answers in the data, long ones of the target": Kind(between(5, 20), either(1, 2)),
    "several turns": Kind(between(3, 8), between(3, 9), exchanges=4, tokens=between(4, 20)),
    "several turns of prompts": Kind(between(3, 8), exchanges=3),
    "thoughts": Kind(between(3, 9), between(3, 9), exchanges=3, thought=between(5, 40)),
    "mixed, most are cut": Kind(either(3, 200), either(2, 300), tokens=either(2, NEW_TOKENS)),
    "passthrough": Kind(between(5, 30), between(5, 60), mode="passthrough"),
    "passthrough of several turns": Kind(between(3, 9), between(3, 30), exchanges=4, mode="passthrough"),
    "passthrough, thoughts": Kind(
        between(3, 9), between(3, 9), exchanges=3, thought=between(5, 40), mode="passthrough"
    ),
    "passthrough, short rows before long ones": Kind(
        between(3, 9), either(1, 1, 1, 250), mode="passthrough", ordered=True
    ),
    "passthrough, another script": Kind(between(3, 9), between(5, 20), mode="passthrough", speak=say_in_russian),
    "passthrough, code": Kind(between(3, 9), between(5, 40), mode="passthrough", speak=write_code),
}


class OfLength(Answerer):
    """Answers with as many tokens as a kind says; of a thinking one, a thought comes first."""

    concurrent = False

    def __init__(self, kind: Kind, chat: ChatTokenizer) -> None:
        self._kind, self._chooser, self.generated = kind, random.Random(5), 0
        encode = chat._tokenizer
        thinks = THOUGHT.format("So.", "Yes.") if kind.thought else "Yes."
        self._ids = encode(thinks, add_special_tokens=False)["input_ids"]
        self._end = encode("<|im_end|>", add_special_tokens=False)["input_ids"]

    def answer(self, dialogues: Sequence[Dialogue], turn: int) -> list[Generated]:
        answers = []
        for dialogue in dialogues:
            room = min(NEW_TOKENS, MAX_LENGTH - len(dialogue.ids))
            count = room if self._kind.tokens is None else min(self._kind.tokens(self._chooser), room)
            ids = [*self._ids, *self._ids * count][:count]
            finished = self._kind.tokens is not None and count > 1
            answers.append(Generated((*ids[:-1], *self._end) if finished else tuple(ids), finished))
            self.generated += count
        return answers

    def close(self) -> None:
        """Nothing runs."""


@dataclass(frozen=True)
class Came:
    """What came of a part of the data; `records` are its finished answers."""

    samples: float
    tokens: float
    generated: float
    records: list[dict[str, Any]] = field(default_factory=list)


def answer(kind: Kind, target: PlannedTarget, files: TargetFiles, folder: Path) -> Came:
    """Prepare the training part and answer it, as the assets do."""
    spec, registry = target.subject.target, target.registry
    prepare_conversations(registry.load_dataset("talks"), spec.data, registry.root, files, folder / "prepared")
    part = folder / "prepared" / "train"
    if kind.mode == "passthrough":
        made = tokenize_part(part, "conversations", files, spec.data, MAX_LENGTH, folder, lambda *_: None)
        return Came(made["samples"], made["tokens"], 0)
    chat = ChatTokenizer.load(files)
    answerer = OfLength(kind, chat)
    run = answering_run(
        files, folder, list(read_conversations(part)), max_length=MAX_LENGTH, responses={"max_new_tokens": NEW_TOKENS}
    )
    made = regenerate_with(run, lambda: answerer, chat).tokens
    with open_kept_answers(run) as kept:
        records = [kept[name] for name in kept.ids]
    return Came(made["samples"], made["tokens"], answerer.generated, records)


def holds(found: Estimate, value: float) -> bool:
    return found.low <= value <= found.high


@pytest.mark.parametrize("name", KINDS)
def test_what_comes_is_within_the_bounds_before_anything_was_answered(
    tmp_path: Path, tiny_target: TargetFiles, name: str
):
    kind = KINDS[name]
    entry = {
        "model": tiny_target.model,
        "max_length": MAX_LENGTH,
        "responses": {"mode": kind.mode, **({} if kind.mode == "passthrough" else {"max_new_tokens": NEW_TOKENS})},
    }
    target = PlannedTarget(tmp_path / "site", entry=entry)
    rows = "".join(
        json.dumps(row, ensure_ascii=False) + "\n" for row in kind.make_rows(ROWS * 4 if kind.ordered else ROWS)
    )
    (target.root / "registry" / "data" / "talks.jsonl").write_text(rows)
    files = tiny_target
    if kind.thought:
        (tmp_path / "thinking.jinja").write_text(THINKING_TEMPLATE)
        files = tiny_target.model_copy(update={"chat_template": str(tmp_path / "thinking.jinja")})
    planned = target.plan().amounts["train"]
    came = answer(kind, target, files, tmp_path / "made")
    assert holds(planned.samples, came.samples), (planned.samples, came)
    assert holds(planned.tokens, came.tokens), (planned.tokens, came)
    assert holds(planned.generated, came.generated), (planned.generated, came)
    if kind.mode == "regenerate":  # twenty answers, as `plan --measure` or an unfinished step has them, say more
        size = measure_records(random.Random(1).sample(came.records, 20))
        assert size is not None
        count = Estimate.exactly(len(came.records))
        assert holds(count.times(size.samples), came.samples)
        assert holds(count.times(size.tokens), came.tokens)
        assert holds(count.times(size.generated), came.generated)
    assert kind.mode == "regenerate" or planned.tokens.high < 25 * planned.tokens.low, "bounds that say nothing"
