"""What a report promised of the draft that is served: the walk (rung 3) by slice, and prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from draftworks.config.data import THINKING
from draftworks.data.conversations import Conversation, read_conversations
from draftworks.data.tokenized import TokenRow
from draftworks.evaluation.ladder.answer_walk import find_answer_spans
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import (
    AcceptanceDifference,
    AcceptanceRatio,
    Resampling,
    drop_rounding,
    examine_difference,
)
from draftworks.evaluation.report.comparison import MeasuredWalk, find_eval_answers
from draftworks.production.asked import digest_messages
from draftworks.production.request_log import TEMPERATURE, RequestTable, shorten
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.identity import token_digest

CONVERSATIONS_FOLDER = "conversations"


@dataclass(frozen=True)
class Place:
    """An answer of a sample, counted from 0."""

    sample: str
    answer: int


@dataclass
class PromptIndex:
    """The answers of an eval set by what was asked for them.

    Attributes:
        places: by the first bytes of the prompt's digest and by how it was asked to think (`thinking` of a sample).
        answers: number of answers of each sample.
    """

    places: dict[int, dict[str, Place]] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[TokenRow], conversations: Iterable[Conversation]) -> PromptIndex:
        """Index samples by the tokens before each answer, and by the messages before it where their turns are known."""
        index = cls()
        for row in rows:
            spans = list(find_answer_spans(row.loss_mask))
            index.answers[row.sample_id] = len(spans)
            ids = row.input_ids.tolist()
            for number, (begin, _) in enumerate(spans):
                index._add(token_digest(ids[:begin]), row.columns, Place(row.sample_id, number))
        for one in conversations:
            answered = [place for place, turn in enumerate(one.turns) if turn.role == "assistant" and turn.trained]
            if len(answered) != index.answers.get(one.id):
                continue  # turns were left out, or the sample is not that conversation as it stands
            for number, place in enumerate(answered):
                messages = ((turn.role, turn.content) for turn in one.turns[:place])
                index._add(digest_messages(messages), one.columns, Place(one.id, number))
        return index

    def _add(self, prompt: str, columns: Mapping[str, object], place: Place) -> None:
        self.places.setdefault(shorten(prompt), {})[str(columns.get(THINKING))] = place

    def find(self, prompt: int, thinking: str) -> Place | None:
        """Return what a request asked for; None if it is no prompt of the eval set, or not clear which of two."""
        found = self.places.get(prompt, {})
        return next(iter(found.values())) if len(found) == 1 else found.get(thinking)


@dataclass(frozen=True)
class Promise:
    """The walk of the newest report of a draft on one eval set.

    Attributes:
        walk: with the eval data; its prompts have counts by sample.
        index: finds the sample of a request.
    """

    report: str
    eval_set: str
    walk: MeasuredWalk
    index: PromptIndex

    @classmethod
    def read(cls, artifacts: ArtifactStore, report: Artifact, eval_set: str) -> Promise:
        """Read them from a report. Raises StoreError if it, or its eval data, is missing or damaged."""
        walk = MeasuredWalk.of(artifacts, report, eval_set)
        folder = find_eval_answers(artifacts, report, eval_set).path / CONVERSATIONS_FOLDER
        return cls(report.path.name, eval_set, walk, PromptIndex.of(walk.tokens or (), _read_turns(folder)))

    def count(self, column: str | None = None, value: str = "") -> np.ndarray:
        """Return passes and accepted tokens of the prompts of a slice, or of all, float64 (prompts, 2)."""
        columns = self.walk.slice_columns
        chosen = (
            one
            for name, one in self.walk.measured.items()
            if column is None or columns.get(name, {}).get(column) == value
        )
        return np.array([[one.passes, one.accepted] for one in chosen], dtype=np.float64).reshape(-1, 2)


def _read_turns(folder: Path) -> Iterable[Conversation]:
    """Return the conversations that the answers were written into; none for eval data that came as tokens."""
    return read_conversations(folder) if folder.is_dir() else ()


@dataclass(frozen=True)
class PromptDifference:
    """A prompt whose served counts are not those of the walk, as (passes, accepted tokens)."""

    sample: str
    served: tuple[int, int]
    promised: tuple[int, int]


@dataclass(frozen=True)
class PromptAgreement:
    """Requests of the eval set's own prompts beside the walk, at temperature 0.

    Attributes:
        requests: that ask what a prompt of the eval set asks.
        sampled: of these, those above temperature 0, or at one that is not known: not compared.
        other_answer: samples whose served answers have another length than the walk's, or not all of them were asked for:
            not compared.
        prompts: that were compared; `equal` have the same passes and accepted tokens.
        paired: served minus promised; None without a prompt.
        differences: the prompts that are not equal.
    """

    requests: int
    sampled: int
    other_answer: int
    prompts: int
    equal: int
    paired: AcceptanceDifference | None
    differences: tuple[PromptDifference, ...]


def compare_prompts(table: RequestTable, promise: Promise, resampling: Resampling) -> PromptAgreement | None:
    """Compare requests of the eval set's prompts with the walk, sample by sample; None if no request is of one.

    Of several requests of one prompt the last counts: at temperature 0 they are the same.
    """
    known = np.fromiter(promise.index.places, dtype=np.uint64, count=len(promise.index.places))
    matched = table.select(np.isin(table.prompt, known))
    thinking = [table.values[THINKING][int(code)] for code in matched.columns[THINKING]]
    places = [promise.index.find(prompt, how) for prompt, how in zip(matched.prompt.tolist(), thinking)]
    greedy = matched.find(TEMPERATURE, "0")
    latest: dict[str, dict[int, int]] = {}
    for row in np.argsort(matched.time, kind="stable").tolist():
        place = places[row]
        if place is not None and greedy[row]:
            latest.setdefault(place.sample, {})[place.answer] = row
    requests = sum(place is not None for place in places)
    if not requests:
        return None
    pairs = {
        name: served for name, rows in latest.items() if (served := _sum(matched, promise, name, rows)) is not None
    }
    promised = promise.walk.measured
    unequal = [
        PromptDifference(name, served, (promised[name].passes, promised[name].accepted))
        for name, served in sorted(pairs.items())
        if served != (promised[name].passes, promised[name].accepted)
    ]
    return PromptAgreement(
        requests=requests,
        sampled=sum(place is not None and not at_0 for place, at_0 in zip(places, greedy)),
        other_answer=len(latest) - len(pairs),
        prompts=len(pairs),
        equal=len(pairs) - len(unequal),
        paired=_compare_paired([(pairs[name], promised[name]) for name in sorted(pairs)], resampling),
        differences=tuple(unequal),
    )


def _sum(table: RequestTable, promise: Promise, sample: str, rows: Mapping[int, int]) -> tuple[int, int] | None:
    """Return passes and accepted tokens of all answers of a sample; None if they are not those of the walk."""
    chosen = list(rows.values())
    walked = promise.walk.measured.get(sample)
    if walked is None or len(rows) != promise.index.answers[sample] or (table.emitted[chosen] < 0).any():
        return None
    if int(table.emitted[chosen].sum()) != walked.emitted:
        return None
    return int(table.passes[chosen].sum()), int(table.accepted[chosen].sum())


def _compare_paired(
    pairs: Sequence[tuple[tuple[int, int], PromptAcceptance]], resampling: Resampling
) -> AcceptanceDifference | None:
    if not pairs:
        return None
    served = np.array([each for each, _ in pairs], dtype=np.float64)
    walked = np.array([[one.passes, one.accepted] for _, one in pairs], dtype=np.float64)
    left, right = (AcceptanceRatio.of_counts(each[:, 1], each[:, 0]) for each in (served, walked))
    influences = drop_rounding(left.influences - right.influences, left.value + right.value + 1)
    tested = examine_difference(left.value - right.value, [influences], resampling)
    return AcceptanceDifference(left.value, right.value, tested.interval, tested.p_value, len(pairs))
