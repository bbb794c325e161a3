"""Summary of a report for the leaderboard and other readers, from report.json only. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from draftworks.config.data import AnswersSampling
from draftworks.config.decoding import AcceptanceRule, Decoding
from draftworks.errors import DataError, DraftworksError, StoreError
from draftworks.evaluation.labels import Exactness, LabelCounts, judge_exactness
from draftworks.evaluation.report.rival_verdict import RivalVerdict
from draftworks.storage.artifacts import Artifact, FileManifest
from draftworks.storage.files import read_json

SCHEMA_VERSION = 2
REPORT, MARKDOWN = "report.json", "report.md"
TABLE, PROMPTS, SLICES = "report.parquet", "prompts.parquet", "slices.parquet"
DIFFERENCES = "differences.parquet"
PLOT, SLICES_PLOT = "acceptance.png", "slices.png"
EVALUATE_AGAIN = "Evaluate the draft again"


def read_report(folder: Path) -> dict[str, Any]:
    """Return the contents of report.json.

    Raises:
        StoreError: missing, damaged, or of another schema.
    """
    path = folder / REPORT
    with report_file_errors(path):
        values = read_json(path)
        version = values["schema_version"]
    if version != SCHEMA_VERSION:
        raise StoreError(f"{path}: expected schema {SCHEMA_VERSION}, found {version}. {EVALUATE_AGAIN}")
    return values


def read_label_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `labels` and `greedy_answers` from the contents of report.json, which may have neither."""
    counts = values.get("labels")
    return {
        "labels": None if counts is None else LabelCounts.from_json(counts),
        "greedy_answers": values.get("greedy_answers"),
    }


def read_answers(values: Mapping[str, Any]) -> AnswersSampling | None:
    """Return how the answers were written from the contents of report.json, which may not say it."""
    found = values.get("answers")
    return None if found is None else AnswersSampling(**found)


def require_prompts_file(folder: Path) -> Path:
    """Return the path of prompts.parquet if it is the file that report.json was published with.

    Raises:
        StoreError: it is missing, altered, or of another report.
    """
    values = read_report(folder)
    with report_file_errors(folder / REPORT):
        published = FileManifest.of_digests({PROMPTS: values["files"][PROMPTS]})
    published.require_intact(folder, f"It is not the file that {REPORT} was published with. {EVALUATE_AGAIN}")
    return folder / PROMPTS


@contextmanager
def report_file_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading `path` inside the block into a StoreError that names it.

    Raises:
        StoreError: in place of an error of the file system, of JSON, or of a missing or wrong value.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise StoreError(f"{path}: expected a file of an evaluation report, found none. {EVALUATE_AGAIN}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, DraftworksError) as error:
        raise StoreError(f"{path}: not of an evaluation report, or damaged ({error!r}). {EVALUATE_AGAIN}") from error


TRAINED = "trained"


@dataclass(frozen=True)
class RungScore:
    """One draft on one rung. Rungs 0 and 1 count no passes, so they have only a value.

    Attributes:
        metric: name of the number; it contains the rung.
        value: acceptance length, or accuracy on rung 0. None without a pass.
        temperature: on rung 4, and on rung 1 where it is of servers that sample.
        low, high: its interval at the level `confidence`.
        speed_up: on rung 4, over decoding without a draft.
        decoding: above temperature 0, with the rule of acceptance; that of a report from before there were several is
            `rejection`.
        servers: those that accept by the rule, as it was known when the report was made; empty without a rule.
    """

    draft: str
    rung: int
    metric: str
    value: float | None
    temperature: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    prompts: int | None = None
    passes: int | None = None
    tokens_per_pass: float | None = None
    speed_up: float | None = None
    decoding: Decoding | None = None
    servers: str = ""

    @property
    def rule(self) -> AcceptanceRule | None:
        return None if self.decoding is None else self.decoding.rule

    @classmethod
    def from_json(cls, draft: str, entry: Mapping[str, Any]) -> RungScore:
        """Read an entry of `rungs`."""
        counted = entry["acceptance"] or {}
        names = ("low", "high", "confidence", "prompts", "passes", "tokens_per_pass")
        return cls(
            draft=draft,
            rung=entry["rung"],
            metric=entry["metric"],
            value=entry["value"],
            temperature=entry["temperature"],
            decoding=Decoding.from_json(entry) if entry["temperature"] else None,
            servers=entry.get("servers", ""),
            speed_up=entry["speed_up"],
            **{name: counted[name] for name in names if counted},
        )


@dataclass(frozen=True)
class ReportSummary:
    """A report without its prompts.

    Attributes:
        created: time of the report, with its time zone.
        weights_digest: of the draft; None if the report does not have it.
        draft_tokens: tokens proposed per pass on rungs 2 to 4.
        label_agreement: share of answer tokens that are the target's argmax; None if it is not known.
        scores: every draft on every rung.
        labels: the counts of that share; None in reports from before they were kept.
        greedy_answers: whether the target wrote the answers, greedily; None if it is not known.
        answers: how the target wrote them; None if others did, or if it is not known.
        rivals: the draft beside what a user could have for nothing; None in reports from before that was measured.
    """

    target: str
    strategy: str
    eval_set: str
    created: datetime
    weights_digest: str | None
    draft_tokens: int
    label_agreement: float | None
    scores: tuple[RungScore, ...]
    provenance: Mapping[str, Any]
    labels: LabelCounts | None = None
    greedy_answers: bool | None = None
    answers: AnswersSampling | None = None
    rivals: RivalVerdict | None = None

    def __post_init__(self) -> None:
        if not self.select_scores(TRAINED, 1):
            raise DataError(
                f"scores: expected a draft {TRAINED!r} with rung 1, found {sorted({s.draft for s in self.scores})}"
            )

    @classmethod
    def load(cls, folder: Path) -> ReportSummary:
        """Read report.json.

        Raises:
            StoreError: missing, damaged, or of another schema.
        """
        values = read_report(folder)
        with report_file_errors(folder / REPORT):
            return cls(
                target=values["target"],
                strategy=values["strategy"],
                eval_set=values["eval_set"],
                created=datetime.fromisoformat(values["created"]),
                weights_digest=values["provenance"].get("weights_digest"),
                draft_tokens=values["draft_tokens"],
                label_agreement=values["label_agreement"],
                scores=tuple(
                    RungScore.from_json(name, entry)
                    for name, draft in values["drafts"].items()
                    for entry in draft["rungs"]
                ),
                provenance=values["provenance"],
                **read_label_fields(values),
                answers=read_answers(values),
                rivals=None if values.get("rivals") is None else RivalVerdict.from_json(values["rivals"]),
            )

    @classmethod
    def load_verdicts(cls, report: Artifact) -> dict[str, RivalVerdict]:
        """Return the verdict on each eval set of a published report, `heldout` first; without those that have none.

        Raises:
            StoreError: a report.json is missing, damaged, or of another schema.
        """
        loaded = {name: cls.load(report.path / name).rivals for name in report.summary.get("evals", ())}
        return {name: verdict for name, verdict in loaded.items() if verdict is not None}

    @property
    def exactness(self) -> Exactness:
        return judge_exactness(self.label_agreement, self.labels, self.greedy_answers)

    @property
    def simulated_acc_len(self) -> float:
        """Rung 1 of the trained draft, greedy; every report has it."""
        [score] = (score for score in self.select_scores(TRAINED, 1) if not score.temperature)
        if score.value is None:
            raise StoreError(f"a report without rung 1 of the trained draft. {EVALUATE_AGAIN}")
        return score.value

    def select_scores(self, draft: str, rung: int) -> tuple[RungScore, ...]:
        """Return the scores of a draft on a rung: on rung 0 one per draft position, on 1 and 4 one per decoding."""
        return tuple(score for score in self.scores if (score.draft, score.rung) == (draft, rung))

    @property
    def best(self) -> RungScore:
        """The trained draft on its highest greedy rung that has a value: the number nearest to serving.

        Sampled rungs are left out: their acceptance does not compare with that of the others, which are greedy.
        """
        greedy = [score for score in self.scores if score.draft == TRAINED and not score.temperature]
        return max((score for score in greedy if score.value is not None), key=lambda score: score.rung)
