"""The model card of a draft: target, training, acceptance, and how that was measured.

It is generated from records alone, so that equal draft, reports and target give equal text. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import yaml

from draftworks.config.decoding import RULE_MEANINGS
from draftworks.config.registry_files import DatasetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.evaluation.acceptance_length import NAME, SYMBOL, name_metric
from draftworks.evaluation.report.pages import format_measured, format_share, render_page, render_table
from draftworks.evaluation.report.summary import TRAINED, ReportSummary, RungScore
from draftworks.evaluation.strategy_metrics import describe_contexts, describe_rates, describe_strategy_metrics
from draftworks.storage.artifacts import Artifact
from draftworks.storage.records import DraftIdentity

FENCE = "---\n"


@dataclass(frozen=True)
class CardSubject:
    """A draft and what its card is made from.

    Attributes:
        reports: by eval set, the main one first.
        dataset: what the draft was trained on.
        changes: in words, what has changed since the draft was trained.
    """

    draft: Artifact
    reports: Sequence[ReportSummary]
    target: TargetFiles
    dataset: DatasetSpec
    changes: Sequence[str] = ()

    @property
    def made_from(self) -> DraftIdentity:
        return DraftIdentity.of(self.draft)

    @property
    def strategy(self) -> str:
        return self.made_from.strategy

    @property
    def base(self) -> str:
        """The hub id, or the name of a target in a local folder, whose path is private."""
        return self.target.name if self.target.revision is None else self.target.model


def model_card(subject: CardSubject) -> str:
    """Return the card: front matter for the Hugging Face hub, then the page."""
    reports, made_from = subject.reports, subject.made_from
    scores = [score for report in reports for score in report.scores]
    used = {score.rule for score in scores}
    return render_page(
        "fleet/model_card.md.j2",
        front_matter=_build_front_matter(subject),
        strategy=subject.strategy,
        base=subject.base,
        best=(*_known(reports[0], 3), *_known(reports[0], 1))[0],
        reports=reports,
        changes=subject.changes,
        target=subject.target,
        description=resolve_strategy(subject.strategy).description,
        options={name: "default" if value is None else value for name, value in made_from.options.items()},
        training=_describe_training(subject),
        rates=describe_rates(subject.strategy, subject.draft.summary["heldout"]),
        settings={name: value for name, value in made_from.training.items() if value is not None},
        rungs=sorted({score.rung for score in scores}),
        rules={rule: meaning for rule, meaning in RULE_MEANINGS.items() if rule in used},
        measured_rows=[_measured_row(report) for report in reports],
        exactness={report.exactness for report in reports},
        contexts=list(dict.fromkeys(filter(None, map(_contexts, reports)))),
        digests=_list_digests(subject),
        pairs=_pairs,
        acceptance_rows=_list_acceptance_rows,
        describe_intervals=_describe_intervals,
    )


def strip_front_matter(card: str) -> str:
    """Return a card without its front matter."""
    return card.removeprefix(FENCE).partition(FENCE)[2].lstrip()


def _build_front_matter(subject: CardSubject) -> str:
    """Return the YAML for the hub. `base_model` is set for hub ids only, since the hub takes any name for one of its own."""
    metrics = dict.fromkeys(
        f"{NAME}, {name_metric(score.metric)}" for report in subject.reports for score in _lengths(report)
    )
    values: dict[str, Any] = {} if subject.target.revision is None else {"base_model": subject.target.model}
    values |= {"tags": ["speculative-decoding", "draft-model", subject.strategy], "metrics": list(metrics)}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _describe_training(subject: CardSubject) -> dict[str, Any]:
    summary, dataset = subject.draft.summary, subject.dataset
    heldout = describe_strategy_metrics(summary["heldout"])
    return {
        "data set": dataset.name,
        "what it is": dataset.description or "not said",
        "licence of the data": dataset.licence or "not said",
        "steps": f"{summary['steps']:,}, published: step {summary['published_step']:,}",
        "tokens": f"{summary['tokens']:,}",
        "ranks": summary["world_size"],
        "loss": f"{_number(summary['first_loss'])} at first, {_number(summary['last_loss'])} at last",
        **{f"held-out {name}": _numbers(value) for name, value in heldout.items()},
    }


def _list_acceptance_rows(report: ReportSummary) -> Iterator[dict[str, Any]]:
    """Yield a row per metric with a column per draft that has more than a walk."""
    drafts = list(dict.fromkeys(score.draft for score in report.scores if score.rung < 2))
    shown = dict.fromkeys((score.rung, score.metric, _describe_servers(score)) for score in report.scores)
    found = {(score.draft, score.metric): score for score in report.scores}
    for rung, metric, servers in sorted(shown, key=itemgetter(0)):
        figure = metric.replace("_", " ") if rung == 0 else f"{SYMBOL}, {name_metric(metric)}"
        cells = {draft: _cell(found.get((draft, metric))) for draft in drafts}
        yield {"rung": rung, "figure": f"{figure}{servers}", **cells}


def _describe_servers(score: RungScore) -> str:
    """Return the servers whose rule a score above temperature 0 is by; else an empty text."""
    return "" if score.rule is None else f" as {score.servers or 'servers that sample'}"


def _measured_row(report: ReportSummary) -> dict[str, Any]:
    counts = {score.rung: f"{score.prompts:,}" for score in _lengths(report) if score.prompts is not None}
    agreement = report.label_agreement
    return {
        "eval set": report.eval_set,
        "prompts": ", ".join(f"{count} (rung {rung})" for rung, count in counts.items()) or "not counted",
        "draft tokens proposed (k)": report.draft_tokens,
        "answer tokens that are the target's argmax": "not known" if agreement is None else format_share(agreement),
        "measured": f"{report.created:%Y-%m-%d}",
    }


def _contexts(report: ReportSummary) -> str:
    """Return whose contexts the scores of rung 1 above temperature 0 are of; an empty text without one."""
    simulated = [score.decoding for score in report.scores if score.rung == 1 and score.decoding is not None]
    return describe_contexts(simulated, report.answers)


def _list_digests(subject: CardSubject) -> dict[str, str]:
    """Return the digests of everything that the draft and its reports were made from."""
    made_from = subject.made_from
    rows = {
        "the draft, by which commands know it": subject.draft.path.name,
        "content of its weights": subject.draft.data_version,
        "target weights": made_from.target,
        "training tokens": made_from.tokens,
        "training features": made_from.features,
        "vocabulary mapping": made_from.vocab_mapping,
    }
    for report in subject.reports:
        for name in ("eval_tokens", "eval_features"):
            rows[f"{name.replace('_', ' ')} of {report.eval_set}"] = report.provenance.get(name)
    return {name: digest for name, digest in rows.items() if digest}


def _lengths(report: ReportSummary) -> list[RungScore]:
    """Return the scores of the trained draft on rungs that count tokens."""
    return [score for score in report.scores if score.draft == TRAINED and score.rung > 0]


def _known(report: ReportSummary, rung: int) -> list[RungScore]:
    return [score for score in report.select_scores(TRAINED, rung) if score.value is not None]


def _cell(score: RungScore | None) -> str:
    if score is None or score.value is None:
        return ""
    value = _number(score.value) if score.rung == 0 else format_measured(score, score.value)
    return value + ("" if score.speed_up is None else f", {score.speed_up:.2f}× plain decoding")


def _describe_intervals(report: ReportSummary) -> str:
    levels = {score.confidence for score in report.scores if score.confidence is not None}
    return f"{max(levels):.0%} intervals over prompts" if levels else "no intervals: no passes were counted"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _numbers(value: float | list[float]) -> str:
    """Return one number, or one per position."""
    return ", ".join(map(_number, value)) if isinstance(value, list) else _number(value)


def _pairs(rows: Mapping[str, Any], name: str = "what") -> str:
    return render_table({name: key, "value": value} for key, value in rows.items())
