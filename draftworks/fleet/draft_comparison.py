"""Two drafts side by side: recipe, data, size, cost, and their figures on each eval set and slice; reads records only. No torch.

A difference is that of the walk (rung 3): accepted tokens per pass of draft A minus those of draft B.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from draftworks.config.draft_options import WEIGHTS
from draftworks.config.run_files import TOKENS_FOLDER
from draftworks.data.slices import LENGTH
from draftworks.errors import DraftworksError, StoreError
from draftworks.evaluation.ladder.statistics import (
    AcceptanceDifference,
    AcceptanceSummary,
    Interval,
    Resampling,
    compare_unpaired,
    summarize_acceptance,
)
from draftworks.evaluation.report.comparison import MeasuredWalk, SliceDifference, WalkPair, explain_other_draft_tokens
from draftworks.fleet.compared_drafts import ComparedDraft, ReportPair, ReportPlace, choose_reports
from draftworks.storage.artifacts import Artifact
from draftworks.storage.names import (
    CONVERSATIONS,
    RESPONSES,
    TOKENIZED_TRAIN,
    VOCAB_MAPPING,
    of_eval_set,
    of_strategy,
)
from draftworks.storage.words import format_count
from draftworks.targets.safetensors_headers import read_header

MISSING = "(not set)"
"""Value of a key that only the other draft has."""
_RECIPE = ("strategy", "start_from", "options", "training")
_TARGET = "weights of the target"
_DATA = ("tokens", "features", "vocab_mapping")
_ANSWERS = ("responses", "max_length", "only_last_turn", "compute_dtype", "backend", "args")
_FIGURES = ("samples", "tokens", "supervised_tokens", "longest", "coverage", "heldout_coverage")
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Difference:
    """One key with another value in each draft."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class DraftCost:
    """Size of a draft, and what its training cost; None where it is not known.

    Attributes:
        weights_bytes: of the published weights.
        hours: of training, from its first to its last step, without waiting in queues.
        rank_hours: hours times the processes that trained.
        tokens: that the training read, an epoch after the other.
    """

    parameters: int | None = None
    weights_bytes: int | None = None
    steps: int | None = None
    tokens: int | None = None
    hours: float | None = None
    rank_hours: float | None = None
    tokens_per_s: float | None = None

    @classmethod
    def of(cls, draft: Artifact | None) -> DraftCost:
        """Read them from a draft's record, and from the header of its weights."""
        if draft is None:
            return cls()
        summary = draft.summary
        seconds, ranks = summary.get("seconds"), summary.get("world_size")
        hours = None if seconds is None else seconds / _SECONDS_PER_HOUR
        path = draft.path / WEIGHTS
        try:
            parameters = sum(math.prod(tensor.shape) for tensor in read_header(path).values())
            nbytes = path.stat().st_size
        except (OSError, DraftworksError):  # pruned, or of another software's layout
            parameters, nbytes = None, None
        return cls(
            parameters,
            nbytes,
            summary.get("steps"),
            summary.get("tokens"),
            hours,
            None if hours is None or ranks is None else hours * ranks,
            summary.get("tokens_per_s"),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _MadeFrom(NamedTuple):
    """Recipe and data of a draft, by key."""

    recipe: dict[str, Any]
    data: dict[str, Any]


def _differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return what differs. A key that only one has is `MISSING` in the other."""
    keys = dict.fromkeys([*a, *b])
    found = (Difference(key, a.get(key, MISSING), b.get(key, MISSING)) for key in keys)
    return tuple(one for one in found if one.a != one.b)


def _read_made_from(side: ComparedDraft) -> _MadeFrom:
    """Return the settings of draft, training and answers; and the versions of the data, with the figures of tokens, vocabulary
    mapping, answers and conversations as far as these are still there."""
    made_from = side.made_from
    if made_from is None:
        return _MadeFrom({"strategy": side.strategy, _TARGET: side.weights_of_target}, {})
    settings = {name: getattr(made_from, name) for name in _RECIPE}
    settings["start_from"] = _name_start(side, made_from.start_from)
    heldout = None if made_from.heldout is None else made_from.heldout.answers
    recipe = _flatten({_TARGET: made_from.target, **settings})
    data = _flatten({**{name: getattr(made_from, name) for name in _DATA}, "heldout": heldout})
    tokens, mapping = (
        _find(side, TOKENIZED_TRAIN, made_from.tokens),
        _find(side, VOCAB_MAPPING, made_from.vocab_mapping),
    )
    for title, made in (("training set", tokens), ("vocabulary", mapping)):
        known = {} if made is None else made.summary
        data |= {f"{title}: {name}": known[name] for name in _FIGURES if name in known}
    answers = None if tokens is None else _find(side, RESPONSES, tokens.identity.get("responses"))
    if answers is not None:
        recipe |= _flatten({name: answers.identity[name] for name in _ANSWERS if name in answers.identity}, "answers: ")
        data["tokenizer"] = answers.identity.get("tokenizer")
        prepared = _find(side, CONVERSATIONS, answers.identity.get("conversations"))
        if prepared is not None:
            recipe |= _flatten({"data": prepared.identity.get("data")})
            data["data set"] = prepared.identity.get("dataset")
    return _MadeFrom(recipe, data)


def _name_start(side: ComparedDraft, weights: str | None) -> str | None:
    """Return the name of the draft that a training began with; of weights of no draft here, the digest, said so."""
    if weights is None:
        return None
    began = _find(side, of_strategy(side.strategy).draft, weights)
    return f"weights {weights}, of no draft here" if began is None else began.path.name


def _find(side: ComparedDraft, asset: str, version: Any) -> Artifact | None:
    """Return the newest result of that content; None if it was pruned."""
    if side.store is None or version is None:
        return None
    known = side.store.list_all(asset, side.target)
    return next((one for one in known if one.data_version == version), None)


def _flatten(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with keys such as `training.lr`."""
    found: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(values)).items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


CONFIDENCE = 0.95


class Kind(StrEnum):
    """How a difference was computed."""

    PAIRED = "paired"
    """On the same prompts, resampled together."""
    UNPAIRED = "unpaired"
    """On other prompts, each draft's resampled by themselves: wider, and the prompts' own difference is in it."""
    NONE = "none"
    """Not at all."""


class Verdict(StrEnum):
    """Which draft is better on an eval set, as far as its interval says."""

    A = "A accepts more"
    B = "B accepts more"
    UNCLEAR = "no clear difference"
    UNKNOWN = "not comparable"


@dataclass(frozen=True)
class EvalSetFigures:
    """Both drafts on one eval set.

    Attributes:
        a, b: the walk of each on all prompts of its report; None without a walk.
        a_draft_tokens, b_draft_tokens: tokens proposed per pass.
        found: the difference, of A minus B; None where there is none.
        reason: why the difference is not paired, or why there is none.
    """

    eval_set: str
    a: AcceptanceSummary | None = None
    b: AcceptanceSummary | None = None
    a_draft_tokens: int | None = None
    b_draft_tokens: int | None = None
    kind: Kind = Kind.NONE
    found: AcceptanceDifference | None = None
    reason: str = ""
    slices: tuple[SliceDifference, ...] = ()

    @property
    def difference(self) -> float | None:
        return None if self.found is None else self.found.difference

    @property
    def interval(self) -> Interval | None:
        return None if self.found is None else self.found.interval

    @property
    def paired(self) -> AcceptanceDifference | None:
        """The difference on the prompts that have the same tokens in both reports and a pass in both."""
        return self.found if self.kind is Kind.PAIRED else None

    @property
    def shared(self) -> int:
        """Number of these prompts."""
        return 0 if self.paired is None else self.paired.prompts

    @property
    def verdict(self) -> Verdict:
        if self.found is None:
            return Verdict.UNKNOWN
        low, high = self.found.interval.low, self.found.interval.high
        return Verdict.A if low > 0 else Verdict.B if high < 0 else Verdict.UNCLEAR

    def describe(self) -> str:
        """Return a sentence with verdict, difference and interval."""
        if self.found is None:
            return f"{self.eval_set}: no difference is computed: {self.reason}"
        prompts = (
            f"{format_count(self.shared, 'prompt')} of both"
            if self.kind is Kind.PAIRED
            else f"other prompts, {self.reason}"
        )
        return (
            f"{self.eval_set}: {self.verdict}: {self.found.difference:+z.3f} accepted tokens per pass "
            f"({self.found.interval.low:+z.3f} to {self.found.interval.high:+z.3f}, {self.kind}, {prompts})"
        )


@dataclass(frozen=True)
class DraftComparison:
    """Two drafts side by side."""

    a: ComparedDraft
    b: ComparedDraft
    reports: ReportPair
    recipe: tuple[Difference, ...]
    data: tuple[Difference, ...]
    costs: tuple[DraftCost, DraftCost]
    figures: tuple[EvalSetFigures, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_of_one_draft(self) -> bool:
        """Whether A and B are the same draft, under whatever names."""
        return self.a.draft is not None and self.b.draft is not None and self.a.draft.path == self.b.draft.path

    @property
    def verdict(self) -> str:
        """Return a sentence on all eval sets together."""
        if self.is_of_one_draft:
            return "A and B are the same draft."
        compared = [one for one in self.figures if one.found is not None]
        if not compared:
            reasons = dict.fromkeys(one.reason for one in self.figures)
            return f"The drafts cannot be compared: {'; '.join(reasons) or 'neither has a report'}."
        found = {one.verdict for one in compared}
        names = {verdict: ", ".join(one.eval_set for one in compared if one.verdict is verdict) for verdict in found}
        unpaired = any(one.kind is Kind.UNPAIRED for one in compared)
        caution = " Not on the same prompts: part of it may be theirs." if unpaired else ""
        if found == {Verdict.UNCLEAR}:
            widest = max(max(-one.interval.low, one.interval.high) for one in compared if one.interval is not None)
            return (
                f"No clear difference on {names[Verdict.UNCLEAR]}; one of more than {widest:z.3f} accepted tokens per pass "
                f"is unlikely.{caution}"
            )
        better = found & {Verdict.A, Verdict.B}
        if len(better) == 1:
            [one] = better
            rest = f"; no clear difference on {names[Verdict.UNCLEAR]}" if Verdict.UNCLEAR in found else ""
            return f"{one} on {names[one]}{rest}.{caution}"
        return f"It depends: A accepts more on {names[Verdict.A]}, B on {names[Verdict.B]}.{caution}"


def compare_drafts(a: ComparedDraft, b: ComparedDraft) -> DraftComparison:
    """Compare two drafts by their newest reports on equal eval data.

    Raises:
        StoreError: a report is damaged.
    """
    reports = choose_reports(a, b)
    refused, notes = _find_reason_not_to_subtract(a, b), list[str]()
    if not refused and a.weights_of_target != b.weights_of_target:
        notes.append(
            "The drafts were trained for other weights of the target: only prompts whose answers are the same are compared."
        )
    figures = tuple(_compare_on(name, reports, refused, bool(notes)) for name in reports.eval_sets)
    for side, place in ((a, reports.a), (b, reports.b)):
        if place is None:
            notes.append(f"{side.name} has no report yet: run the job `evaluate`.")
    costs, made_from = (DraftCost.of(a.draft), DraftCost.of(b.draft)), (_read_made_from(a), _read_made_from(b))
    recipe, data = (_differ(*both) for both in zip(*made_from, strict=True))
    return DraftComparison(a, b, reports, recipe, data, costs, figures, tuple(notes))


def _find_reason_not_to_subtract(a: ComparedDraft, b: ComparedDraft) -> str:
    if a.target == b.target:
        return ""
    known = {a.weights_of_target, b.weights_of_target}
    if len(known) == 1 and None not in known:
        return ""  # one model under two names
    return f"they are drafts of different targets, {a.target} and {b.target}"


def _compare_on(eval_set: str, reports: ReportPair, refused: str, other_weights: bool) -> EvalSetFigures:
    a = None if reports.a is None else _read_walk(reports.a, eval_set)
    b = None if reports.b is None else _read_walk(reports.b, eval_set)
    resampling = Resampling(CONFIDENCE)
    figures = EvalSetFigures(
        eval_set,
        _summarize(a, resampling),
        _summarize(b, resampling),
        None if a is None else a.draft_tokens,
        None if b is None else b.draft_tokens,
    )
    if refused:
        return replace(figures, reason=refused)
    if a is None or b is None or not a.prompts or not b.prompts:
        which = "A" if a is None or not a.prompts else "B"
        return replace(figures, reason=f"draft {which} has no walk on it")
    refused = explain_other_draft_tokens(a, b, "by A", "by B")
    if refused:
        return replace(figures, reason=refused)
    pair = WalkPair(a, b, resampling)
    if pair.shared:
        slices = [*pair.list_slices(_list_slices(reports)), *pair.list_positions()]
        compared = tuple(one.compare(resampling) for one in slices)
        return replace(figures, kind=Kind.PAIRED, found=pair.compare(), slices=compared)
    reason = "no prompt has the same tokens in both reports"
    if other_weights:
        return replace(figures, reason=f"{reason}, and the weights of the target are others")
    found = compare_unpaired(a.prompts, b.prompts, resampling)
    if found is None:
        return replace(figures, reason="one of the walks has no pass")
    return replace(figures, kind=Kind.UNPAIRED, found=found, reason=reason)


def _summarize(walk: MeasuredWalk | None, resampling: Resampling) -> AcceptanceSummary | None:
    return None if walk is None or not walk.prompts else summarize_acceptance(walk.prompts, resampling)


def _list_slices(reports: ReportPair) -> list[str]:
    """Return the columns by which either report was sliced."""
    names = dict.fromkeys([LENGTH])
    for place in (reports.a, reports.b):
        evaluation = None if place is None or place.artifact is None else place.artifact.identity.get("evaluation")
        names |= dict.fromkeys((evaluation or {}).get("slices") or ())
    return list(names)


def _read_walk(place: ReportPlace, eval_set: str) -> MeasuredWalk | None:
    """Return the walk of a report on an eval set, with the tokens if they are still there; None if it has no such set."""
    folder = place.folders.get(eval_set)
    return None if folder is None else MeasuredWalk.read(folder, _find_tokens(place, eval_set))


def _find_tokens(place: ReportPlace, eval_set: str) -> Path | None:
    if place.artifact is None or place.store is None:
        return None
    wanted = dict(place.answers).get(eval_set)
    try:
        known = place.store.list_all(of_eval_set(eval_set).responses, place.artifact.target)
    except (ValueError, StoreError):
        return None
    return next((one.path / TOKENS_FOLDER for one in known if one.data_version == wanted), None)
