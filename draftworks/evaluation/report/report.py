"""`Report`: the measurements of several drafts on one eval set, and reading it back from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from draftworks.config.data import AnswersSampling
from draftworks.config.decoding import Decoding
from draftworks.errors import ConfigError
from draftworks.evaluation.labels import Exactness, LabelCounts, judge_exactness
from draftworks.evaluation.ladder.measurement import DraftMeasurement, LoopMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import ratio
from draftworks.evaluation.ladder.statistics import DEFAULT_RESAMPLING, Resampling
from draftworks.evaluation.report.figures import (
    LOOP,
    BaselineComparison,
    Figure,
    collect_figures,
    compare_on_walk,
    get_metric_name,
)
from draftworks.evaluation.report.rival_verdict import RivalVerdict
from draftworks.evaluation.report.rivals import (
    RIVAL_COLUMNS,
    RivalSlice,
    compare_slices,
    judge_rivals,
    measure_without_loops,
)
from draftworks.evaluation.report.slices import measure_slices
from draftworks.evaluation.report.summary import (
    REPORT,
    SCHEMA_VERSION,
    TRAINED,
    read_answers,
    read_label_fields,
    read_report,
    report_file_errors,
    require_prompts_file,
)
from draftworks.evaluation.report.tables import PromptsByRung, read_prompts, select_walk_by_position
from draftworks.evaluation.report.thinking import AskedSample, ThinkingComparison, compare_thinking
from draftworks.evaluation.result import EvalResult
from draftworks.evaluation.rivals.loops import AnswerLoops

NOT_MEASURED = {
    "dropped_turns": "turns were left out: no room within max_length, or the template refused to go on",
    "unfinished_answers": "answers were cut off by max_new_tokens or max_length",
    "cut_samples": "samples were cut to max_length",
    "rejected": "conversations gave no sample",
    "repeated": "conversations were left out, as others ask the same",
}
"""Counts of an eval set's summary that say what is not in it, and what a report says of each."""


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


@dataclass(frozen=True)
class Report:
    """Measurements of several drafts on one eval set of one target.

    Attributes:
        drafts: by name: `trained`, the same `untrained`, and what proposes without a model, e.g. `lookup`.
        draft_tokens: tokens proposed per pass on rungs 2 to 4.
        label_agreement: share of answer tokens that are the target's argmax; None if it is not known. Rungs 2 and 3 are
            exact only if it is 1.
        labels: the counts of that share; None in reports from before they were kept.
        greedy_answers: whether the target wrote the answers, greedily; None if it is not known.
        answers: how the target wrote them; None if others did, or if it is not known.
        columns: columns of the samples (task, length, …), indexed by sample id; the walk is sliced by each of them.
        absent_columns: columns that were to be sliced by, and that no sample of this eval set has.
        asked: by sample id, for eval data that was asked with thinking on and off; empty for other data.
        repeated: share of repeated n-grams in the answers of a sample, by its id; None if it was not measured.
        resampling: settings of the intervals.
        provenance: digests and settings of the draft and its eval data.
    """

    target: str
    strategy: str
    eval_set: str
    drafts: Mapping[str, DraftMeasurement]
    draft_tokens: int
    label_agreement: float | None = None
    labels: LabelCounts | None = None
    greedy_answers: bool | None = None
    answers: AnswersSampling | None = None
    columns: pd.DataFrame | None = field(default=None, compare=False)
    absent_columns: tuple[str, ...] = ()
    asked: Mapping[str, AskedSample] = field(default_factory=dict, compare=False)
    repeated: Mapping[str, float] | None = field(default=None, compare=False)
    resampling: Resampling = DEFAULT_RESAMPLING
    provenance: Mapping[str, Any] = field(default_factory=dict)
    created: datetime = field(default_factory=_now)

    def __post_init__(self) -> None:
        if TRAINED not in self.drafts:
            raise ConfigError(f"drafts of a report: expected {TRAINED!r} among them, found {', '.join(self.drafts)}")
        if self.label_agreement is not None and not 0 <= self.label_agreement <= 1:
            raise ConfigError(f"label_agreement: expected a share between 0 and 1, found {self.label_agreement}")

    @property
    def title(self) -> str:
        return f"{self.strategy} draft of {self.target}, {self.eval_set}"

    @property
    def exactness(self) -> Exactness:
        return judge_exactness(self.label_agreement, self.labels, self.greedy_answers)

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """The numbers of every draft on every rung; computed once, as intervals of large eval sets take seconds."""
        return collect_figures(self.drafts, self.resampling, self.strategy)

    @cached_property
    def comparisons(self) -> tuple[BaselineComparison, ...]:
        """The trained draft compared with the others on the walk."""
        return compare_on_walk(self.drafts, self.resampling)

    @cached_property
    def walk_slices(self) -> pd.DataFrame:
        """The walk of the trained draft by every column of the eval data and by the place in the text, beside the best rival."""
        compared = self.compared_slices
        measured = measure_slices([one.slice for one in compared], self.resampling)
        beside = pd.DataFrame([one.to_row() for one in compared], columns=list(RIVAL_COLUMNS))
        return pd.concat([measured, beside.astype(RIVAL_COLUMNS)], axis=1)

    @cached_property
    def compared_slices(self) -> list[RivalSlice]:
        return compare_slices(self.drafts, self.columns, self.resampling)

    @cached_property
    def rivals(self) -> RivalVerdict | None:
        """The trained draft beside what a user could have for nothing; None if that was not measured."""
        return judge_rivals(self.comparisons, self.compared_slices)

    @property
    def loops(self) -> AnswerLoops | None:
        return None if self.repeated is None else AnswerLoops.of(self.repeated)

    @property
    def walk_without_loops(self) -> dict[str, float | None]:
        """Accepted tokens per pass on the samples whose answers run in no loop, by draft; {} if that was not measured."""
        return {} if self.repeated is None else measure_without_loops(self.drafts, self.repeated)

    @cached_property
    def thinking(self) -> ThinkingComparison | None:
        """The walk of the trained draft with thinking on and off; None for eval data that was not asked both ways."""
        return compare_thinking(self.drafts[TRAINED].walk, self.asked, self.resampling)

    @property
    def headline(self) -> Figure:
        """The trained draft's walk, or else its highest greedy rung that has a value."""
        known = [found for found in self.figures if found.draft == TRAINED and found.value is not None]
        greedy = [found for found in known if found.is_greedy]
        return max(greedy, key=lambda found: (found.rung == 3, found.rung))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "created": self.created.isoformat(),
            "target": self.target,
            "strategy": self.strategy,
            "eval_set": self.eval_set,
            "draft_tokens": self.draft_tokens,
            "label_agreement": self.label_agreement,
            **({} if self.labels is None else {"labels": self.labels.to_json()}),
            **({} if self.greedy_answers is None else {"greedy_answers": self.greedy_answers}),
            **({} if self.answers is None else {"answers": self.answers.model_dump()}),
            "resampling": asdict(self.resampling),
            "drafts": {name: self._draft_json(name, measured) for name, measured in self.drafts.items()},
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            **({} if self.rivals is None else {"rivals": self.rivals.to_json()}),
            **self._loops_json(),
            **({} if self.thinking is None else {"thinking": self.thinking.to_json()}),
            **({"absent_columns": list(self.absent_columns)} if self.absent_columns else {}),
            "provenance": dict(self.provenance),
        }

    def _loops_json(self) -> dict[str, Any]:
        if self.loops is None:
            return {}
        return {"answer_loops": {**self.loops.to_json(), "walk_without": self.walk_without_loops}}

    def _draft_json(self, name: str, measured: DraftMeasurement) -> dict[str, Any]:
        return {
            "result": None if measured.result is None else measured.result.to_json(),
            "metrics": {} if measured.result is None else measured.result.metrics(),
            "rungs": [found.to_json() for found in self.figures if found.draft == name],
            "loops": [_loop_json(loop) for loop in measured.loops if loop.prompts],
        }

    @classmethod
    def load(cls, folder: Path) -> Report:
        """Read a saved report, all but the columns of the eval data, how it was asked and how far its answers repeat
        themselves, which are not in its files.

        Raises:
            StoreError: missing, damaged, altered, or of another schema.
        """
        values = read_report(folder)
        prompts = _saved_prompts(folder)
        with report_file_errors(folder / REPORT):
            return cls(
                target=values["target"],
                strategy=values["strategy"],
                eval_set=values["eval_set"],
                drafts={name: _measurement(name, draft, prompts) for name, draft in values["drafts"].items()},
                draft_tokens=values["draft_tokens"],
                label_agreement=values["label_agreement"],
                **read_label_fields(values),
                answers=read_answers(values),
                absent_columns=tuple(values.get("absent_columns", ())),
                resampling=Resampling(**values["resampling"]),
                provenance=values["provenance"],
                created=datetime.fromisoformat(values["created"]),
            )


def _saved_prompts(folder: Path) -> PromptsByRung:
    path = require_prompts_file(folder)
    with report_file_errors(path):
        return read_prompts(path)


def _loop_json(loop: LoopMeasurement) -> dict[str, Any]:
    """Return the measurement with its speed-up and tokens per pass."""
    passes, emitted = (sum(getattr(prompt, name) for prompt in loop.prompts) for name in ("passes", "emitted"))
    return {**loop.to_json(), "speed_up": loop.speed_up, "tokens_per_pass": ratio(emitted, passes)}


def _get_loop_name(loop: Mapping[str, Any]) -> str:
    """Return the name of a loop in prompts.parquet; before rules were named it had none of one."""
    return f"{LOOP}_t{loop['temperature']:g}" if "rule" not in loop else get_metric_name(4, Decoding.from_json(loop))


def _measurement(name: str, values: Mapping[str, Any], prompts: PromptsByRung) -> DraftMeasurement:
    return DraftMeasurement(
        result=None if values["result"] is None else EvalResult.from_json(values["result"]),
        blocks=prompts.get((name, get_metric_name(2)), ()),
        walk=prompts.get((name, get_metric_name(3)), ()),
        walk_by_position=select_walk_by_position(prompts, name),
        loops=tuple(LoopMeasurement.from_json(loop, prompts[name, _get_loop_name(loop)]) for loop in values["loops"]),
    )
