"""The description in a bundle: target, draft, flags by server, promised acceptance, licences, lineage. Torch-free.

It is made from records alone, so that equal draft, report, export and target give equal text. Lengths are τ, see
`draftworks.evaluation.acceptance_length`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftworks.config.decoding import RULE_MEANINGS
from draftworks.config.registry_files import DatasetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import StoreError
from draftworks.evaluation.acceptance_length import NOTE, RUNG_MEANINGS, count_own_token
from draftworks.evaluation.report.rival_verdict import RivalVerdict
from draftworks.evaluation.report.summary import EVALUATE_AGAIN, REPORT, SLICES, TRAINED, ReportSummary, RungScore
from draftworks.export.conventions import CARD, RELEASES
from draftworks.servers.counters import SGLANG_COUNTERS
from draftworks.storage.artifacts import Artifact, FileManifest
from draftworks.storage.files import read_bytes
from draftworks.storage.hub import find_cached_hub_file
from draftworks.storage.identity import digest
from draftworks.storage.names import HELDOUT
from draftworks.storage.records import DraftIdentity, ExportIdentity, ReportIdentity

SCHEMA_VERSION = 1
TARGET_MODEL = "TARGET_MODEL"
"""Placeholder in flags for a target in a local folder, whose path is private."""
GREEDY = "greedy"
GREEDY_MEANING = "At temperature 0: a proposed token is accepted if it is the target's own argmax."
VERSIONS: Mapping[str, Sequence[str]] = {
    "sglang": SGLANG_COUNTERS.versions,
    "vllm": tuple(release.version for release in RELEASES),
}
"""Versions of each engine that the flags are known for."""
MAX_CARD_BYTES = 1 << 20
MAX_LICENCE = 200
WALK = 3


@dataclass(frozen=True)
class BundleSubject:
    """A draft and what its bundle is made from.

    Attributes:
        report: of this draft, on every eval set.
        export: the files that servers load.
        datasets: what the draft was trained on.
    """

    draft: Artifact
    report: Artifact
    export: Artifact
    target: TargetFiles
    datasets: Sequence[DatasetSpec]

    @property
    def made_from(self) -> DraftIdentity:
        return DraftIdentity.of(self.draft)

    @property
    def is_hub(self) -> bool:
        return self.target.revision is not None


def describe_bundle(subject: BundleSubject) -> dict[str, Any]:
    """Return the description as JSON values.

    Raises:
        StoreError: the report is damaged, or cannot be read.
    """
    target, promised = subject.target, [_describe_promise(one, slices) for one, slices in _read_reports(subject)]
    rules = {each["rule"] for one in promised for each in one["acceptance"]}
    rungs = sorted({each["rung"] for one in promised for each in one["acceptance"]})
    return {
        "schema": SCHEMA_VERSION,
        "target": {
            "name": target.name,
            "model": target.model if subject.is_hub else None,
            "revision": target.revision,
            "digest": target.digest,
        },
        "draft": {
            "strategy": subject.made_from.strategy,
            "digest": subject.draft.path.name,
            "weights": subject.draft.data_version,
        },
        "formats": {name: _describe_format(subject, made) for name, made in subject.export.summary["formats"].items()},
        "promised": promised,
        "meanings": {
            "acceptance_length": NOTE,
            "rungs": {str(rung): RUNG_MEANINGS[rung] for rung in rungs if rung in RUNG_MEANINGS},
            "rules": {
                rule: meaning for rule, meaning in {GREEDY: GREEDY_MEANING, **RULE_MEANINGS}.items() if rule in rules
            },
        },
        "licences": _describe_licences(subject),
        "lineage": _describe_lineage(subject),
    }


def _describe_format(subject: BundleSubject, made: Mapping[str, Any]) -> dict[str, Any]:
    private = set() if subject.is_hub else {subject.target.model, *_list_paths(subject.export)}
    known = {name: made.get(name) for name in ("digest", "dtype", "nbytes", "loaders")}
    servers = [_describe_command(server, line, private) for server, line in made["commands"].items()]
    return {**known, "servers": servers}


def _list_paths(export: Artifact) -> list[str]:
    """Return where the target was when a draft was exported, as its command lines have it."""
    made_for = ExportIdentity.of(export).target or ()
    return [path for path in made_for[1:2] if path]


def _describe_command(server: str, line: str, private: Collection[str]) -> dict[str, Any]:
    """Return a command line as data; `DRAFT_FOLDER` stands for the folder of the format."""
    words = [TARGET_MODEL if word in private else word for word in shlex.split(line)]
    engine = server.split(",")[0].strip().lower()
    return {
        "server": server,
        "engine": engine,
        "versions": list(VERSIONS.get(engine, ())),
        "command": words,
        "flags": dict(_list_flags(words)),
    }


def _list_flags(words: Sequence[str]) -> Iterator[tuple[str, str | bool]]:
    """Yield the options of a command line with their values; True for one without."""
    for place, word in enumerate(words):
        if word.startswith("--"):
            after = words[place + 1] if place + 1 < len(words) else "--"
            name, equals, value = word.partition("=")
            yield name, value if equals else True if after.startswith("--") else after


def _read_reports(subject: BundleSubject) -> Iterator[tuple[ReportSummary, list[dict[str, Any]]]]:
    """Yield the report on each eval set with its slices, `heldout` first."""
    report = subject.report
    published = FileManifest.of_digests(report.files)
    for name in (HELDOUT, *ReportIdentity.of(report).evals):
        files = [file for file in (f"{name}/{REPORT}", f"{name}/{SLICES}") if file in report.files]
        published.require_intact(report.path, EVALUATE_AGAIN, files)
        has_slices = f"{name}/{SLICES}" in files
        yield ReportSummary.load(report.path / name), _read_slices(report.path / name / SLICES) if has_slices else []


def _read_slices(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path}: cannot be read: {error}. {EVALUATE_AGAIN}") from None


def _describe_promise(report: ReportSummary, slices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a draft accepted of one eval set, on each rung, by slice, and beside what costs nothing."""
    counted = [score for score in report.scores if score.rung > 0]
    walk = next((score for score in report.select_scores(TRAINED, WALK)), None)
    return {
        "eval_set": report.eval_set,
        "measured": report.created.isoformat(),
        "draft_tokens": report.draft_tokens,
        "acceptance": [_describe_score(score) for score in counted if score.draft == TRAINED],
        "slices": [
            {
                "column": each["column"],
                "value": each["value"],
                "rule": GREEDY,
                "prompts": each["prompts"],
                **_describe_length(each["micro"], each["low"], each["high"]),
                "confidence": None if walk is None else walk.confidence,
            }
            for each in slices
        ],
        "free": {
            "walk": [
                {"name": score.draft, **_describe_length(score.value, score.low, score.high)}
                for score in counted
                if score.rung == WALK and score.draft != TRAINED
            ],
            "best": None if report.rivals is None else _describe_rivals(report.rivals),
        },
    }


def _describe_score(score: RungScore) -> dict[str, Any]:
    return {
        "rung": score.rung,
        "metric": score.metric,
        "rule": score.rule or GREEDY,
        "temperature": score.temperature or 0.0,
        "as_served_by": score.servers,
        **_describe_length(score.value, score.low, score.high),
        "confidence": score.confidence,
        "prompts": score.prompts,
        "passes": score.passes,
    }


def _describe_length(accepted: float | None, low: float | None, high: float | None) -> dict[str, float | None]:
    return {"acceptance_length": _to_length(accepted), "low": _to_length(low), "high": _to_length(high)}


def _to_length(accepted: float | None) -> float | None:
    """Return τ; None for what was not measured, which Parquet may hold as NaN."""
    return None if accepted is None or not math.isfinite(accepted) else count_own_token(accepted)


def _describe_rivals(verdict: RivalVerdict) -> dict[str, Any]:
    """Return the draft beside the best of what costs nothing; `difference` is the draft's length minus its."""
    return {
        "name": verdict.rival,
        "acceptance_length": _to_length(verdict.rival_accepted),
        "difference": verdict.difference,
        "low": verdict.low,
        "high": verdict.high,
        "confidence": verdict.confidence,
        "prompts": verdict.prompts,
        "lost_slices": [
            {
                "column": each.column,
                "value": each.value,
                "prompts": each.prompts,
                "acceptance_length": _to_length(each.accepted),
                "name": each.rival,
                "free_acceptance_length": _to_length(each.rival_accepted),
            }
            for each in verdict.lost
        ],
    }


def _describe_licences(subject: BundleSubject) -> dict[str, Any]:
    """Return what cards and registry say of licences, and where; None for what nobody said. Nothing is inferred."""
    said = {each.name: each.licence or None for each in subject.datasets}
    return {
        "target": {"licence": _read_model_licence(subject.target), "from": f"{CARD} of the model"},
        "data": [{"dataset": name, "licence": licence, "from": "registry"} for name, licence in said.items()],
    }


def _read_model_licence(target: TargetFiles) -> str | None:
    """Return the licence in the front matter of the model's own card; None if there is none, or no readable one."""
    path = (
        Path(target.model) / CARD
        if target.revision is None
        else find_cached_hub_file(target.model, target.revision, CARD)
    )
    try:
        text = "" if path is None else read_bytes(path, MAX_CARD_BYTES).decode()
        begin, _, rest = text.partition("---\n")
        front = yaml.safe_load(rest.partition("\n---")[0]) if not begin.strip() else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    if not isinstance(front, dict):
        return None
    # `other` is the hub's word for a licence that has a name and a link of its own.
    found = front.get("license_name") if front.get("license") == "other" else front.get("license")
    found = ", ".join(map(str, found)) if isinstance(found, list) else found
    is_text = isinstance(found, str) and found.isprintable() and len(found) <= MAX_LICENCE
    return found if is_text and found else None


def _describe_lineage(subject: BundleSubject) -> dict[str, Any]:
    made_from, report = subject.made_from, ReportIdentity.of(subject.report)
    measured = {HELDOUT: report.heldout, **report.evals}
    return {
        "target_weights": made_from.target,
        "training_tokens": made_from.tokens,
        "training_features": made_from.features,
        "vocabulary_mapping": made_from.vocab_mapping,
        "start_from": made_from.start_from,
        "arrival": None if made_from.arrival is None else dict(made_from.arrival),
        "options": made_from.options,
        "training": dict(made_from.training),
        "settings": digest([made_from.options, dict(made_from.training)]),
        "datasets": [each.name for each in subject.datasets],
        "report": subject.report.path.name,
        "eval_data": {name: None if data is None else data.to_json() for name, data in measured.items()},
        "export": subject.export.path.name,
    }
