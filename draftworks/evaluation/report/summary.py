"""What a leaderboard needs of a report, read from report.json alone. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from draftworks.errors import DataError, DraftworksError, StoreError
from draftworks.storage.manifest import FileManifest
from draftworks.storage.regular_files import read_json

SCHEMA_VERSION = 2
REPORT, MARKDOWN = "report.json", "report.md"
TABLE, PROMPTS, SLICES = "report.parquet", "prompts.parquet", "slices.parquet"
DIFFERENCES = "differences.parquet"
PLOT, SLICES_PLOT = "acceptance.png", "slices.png"
EVALUATE_AGAIN = "Evaluate the draft again"


def read_report(folder: Path) -> dict[str, Any]:
    """The contents of report.json.

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


def require_prompts_file(folder: Path) -> Path:
    """prompts.parquet, being the one that report.json was published with.

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
    """Whatever is wrong with the contents of `path` is said with its name.

    Raises:
        StoreError: instead of what went wrong inside.
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
    """One draft on one rung. Rungs 0 and 1 count no passes: they have a value and nothing else.

    Attributes:
        metric: the name of the number, with its rung in it.
        value: an acceptance length; on rung 0 an accuracy. None if there was no pass.
        low, high: its interval at the level `confidence`.
        speed_up: of rung 4, over decoding without a draft.
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

    @classmethod
    def from_json(cls, draft: str, entry: Mapping[str, Any]) -> RungScore:
        """From an entry of `rungs`."""
        counted = entry["acceptance"] or {}
        names = ("low", "high", "confidence", "prompts", "passes", "tokens_per_pass")
        return cls(
            draft=draft,
            rung=entry["rung"],
            metric=entry["metric"],
            value=entry["value"],
            temperature=entry["temperature"],
            speed_up=entry["speed_up"],
            **{name: counted[name] for name in names if counted},
        )


@dataclass(frozen=True)
class ReportSummary:
    """A report without its prompts.

    Attributes:
        created: when the evaluation was reported, with its time zone.
        weights_digest: of the draft; None where the report does not know.
        draft_tokens: tokens proposed per pass on rungs 2 to 4.
        label_agreement: share of answer tokens that are the target's own argmax; None if it is not known.
        scores: of every draft on every rung.
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

    def __post_init__(self) -> None:
        if not self.of(TRAINED, 1):
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
            )

    @property
    def simulated_acc_len(self) -> float:
        """Rung 1 of the trained draft, which every report has."""
        return self.of(TRAINED, 1)[0].value

    def of(self, draft: str, rung: int) -> tuple[RungScore, ...]:
        """Empty if it was not measured; on rung 0 one per position, on rung 4 one per temperature."""
        return tuple(score for score in self.scores if (score.draft, score.rung) == (draft, rung))

    @property
    def best(self) -> RungScore:
        """The trained draft on the highest rung that has a value: the number nearest to serving.

        Only greedy decoding counts: at a temperature drafts are accepted at other rates, which compare with no lower rung.
        """
        greedy = [score for score in self.scores if score.draft == TRAINED and not score.temperature]
        return max((score for score in greedy if score.value is not None), key=lambda score: score.rung)
