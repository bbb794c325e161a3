"""The model card of a draft: target, training, acceptance, and how that was measured.

It is generated from records alone, so that equal draft, reports and target give equal text. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import yaml

from draftworks.config.decoding import RULE_MEANINGS
from draftworks.config.registry_files import DatasetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.evaluation.acceptance_length import NAME, NOTE, SYMBOL, format_interval, format_length, name_metric
from draftworks.evaluation.labels import Exactness
from draftworks.evaluation.ladder.rungs import RUNG_MEANINGS
from draftworks.evaluation.report.markdown_tables import render_table
from draftworks.evaluation.report.sampled import describe_contexts, describe_rates
from draftworks.evaluation.report.summary import TRAINED, ReportSummary, RungScore
from draftworks.evaluation.strategy_metrics import describe_strategy_metrics
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
    parts = [_front_matter(subject), _introduction(subject), _target(subject), _strategy(subject), _training(subject)]
    parts += [_acceptance(subject), _rungs(subject), _measuring(subject), _limits(subject), _provenance(subject)]
    return "\n\n".join(parts) + "\n"


def strip_front_matter(card: str) -> str:
    """Return a card without its front matter."""
    return card.removeprefix(FENCE).partition(FENCE)[2].lstrip()


def _front_matter(subject: CardSubject) -> str:
    """Return the YAML front matter. `base_model` is set for hub ids only, since the hub takes any name for one of its
    own."""
    metrics = dict.fromkeys(
        f"{NAME}, {name_metric(score.metric)}" for report in subject.reports for score in _lengths(report)
    )
    values: dict[str, Any] = {} if subject.target.revision is None else {"base_model": subject.target.model}
    values |= {"tags": ["speculative-decoding", "draft-model", subject.strategy], "metrics": list(metrics)}
    return f"{FENCE}{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}{FENCE}".rstrip()


def _introduction(subject: CardSubject) -> str:
    report = subject.reports[0]
    best = (*_known(report, 3), *_known(report, 1))[0]
    return (
        f"# {subject.strategy} draft of {subject.base}\n\n"
        "A draft model for speculative decoding: it proposes tokens, the target verifies them in one forward pass. It is of no use "
        f"without its target, and where the server verifies exactly, it changes how fast the target answers, not what.\n\nThe {NAME} is **{_value(best)}**, with "
        f"{report.draft_tokens} tokens proposed per pass of the target, by the {name_metric(best.metric)} on {report.eval_set}."
        f"{_staleness(subject)}"
    )


def _staleness(subject: CardSubject) -> str:
    if not subject.changes:
        return ""
    changes = "\n".join(f"* {change}" for change in subject.changes)
    return (
        f"\n\n**This draft is stale.** The numbers are of the target as it was when they were measured; the draft was trained "
        f"before these changed, and stays stale until it is trained again:\n\n{changes}"
    )


def _target(subject: CardSubject) -> str:
    target = subject.target
    rows = {
        "model": subject.base,
        "revision": target.revision or "a local directory, known by its digest",
        "weights digest": target.digest,
        "tokenizer digest (with chat template)": target.tokenizer_digest,
        "layers": target.num_layers,
        "hidden size": target.hidden_size,
        "vocabulary": target.vocab_size,
    }
    return _section("Target", _pairs(rows))


def _strategy(subject: CardSubject) -> str:
    options = {name: "default" if value is None else value for name, value in subject.made_from.options.items()}
    return _section("Strategy", resolve_strategy(subject.strategy).description, _pairs(options, "option"))


def _training(subject: CardSubject) -> str:
    summary = subject.draft.summary
    rows = {
        "data set": subject.dataset.name,
        "what it is": subject.dataset.description or "not said",
        "licence of the data": subject.dataset.licence or "not said",
        "steps": f"{summary['steps']:,}, published: step {summary['published_step']:,}",
        "tokens": f"{summary['tokens']:,}",
        "ranks": summary["world_size"],
        "loss": f"{_number(summary['first_loss'])} at first, {_number(summary['last_loss'])} at last",
        **{
            f"held-out {name}": _numbers(value) for name, value in describe_strategy_metrics(summary["heldout"]).items()
        },
    }
    rates = describe_rates(subject.strategy, summary["heldout"])
    settings = {name: value for name, value in subject.made_from.training.items() if value is not None}
    return _section("Training", _pairs(rows), *([f"Held-out {rates}."] if rates else []), _pairs(settings, "setting"))


def _acceptance(subject: CardSubject) -> str:
    """Return a table per eval set with a row per metric and a column per draft."""
    return _section("Acceptance", *chain.from_iterable(map(_acceptance_on, subject.reports)))


def _acceptance_on(report: ReportSummary) -> tuple[str, str]:
    drafts = list(dict.fromkeys(score.draft for score in report.scores))
    shown = sorted(
        dict.fromkeys((score.rung, score.metric, _describe_servers(score)) for score in report.scores),
        key=itemgetter(0),
    )
    found = {(score.draft, score.metric): score for score in report.scores}
    rows = [
        {
            "rung": rung,
            "figure": f"{_title(rung, metric)}{servers}",
            **{draft: _cell(found.get((draft, metric))) for draft in drafts},
        }
        for rung, metric, servers in shown
    ]
    return f"On `{report.eval_set}`, with {_confidence(report)}:", render_table(rows)


def _title(rung: int, metric: str) -> str:
    return metric.replace("_", " ") if rung == 0 else f"{SYMBOL}, {name_metric(metric)}"


def _describe_servers(score: RungScore) -> str:
    """Return the servers whose rule a score above temperature 0 is by; else an empty text."""
    return "" if score.rule is None else f" as {score.servers or 'servers that sample'}"


def _rungs(subject: CardSubject) -> str:
    scores = [score for report in subject.reports for score in report.scores]
    lines = [f"* **Rung {rung}**: {RUNG_MEANINGS[rung]}" for rung in sorted({score.rung for score in scores})]
    used = {score.rule for score in scores}
    lines += [f"* `{rule}`: {meaning}." for rule, meaning in RULE_MEANINGS.items() if rule in used]
    return _section("What the rungs mean", "\n".join(lines), NOTE)


def _measuring(subject: CardSubject) -> str:
    rows = [
        {
            "eval set": report.eval_set,
            "prompts": _prompts(report),
            "draft tokens proposed (k)": report.draft_tokens,
            "answer tokens that are the target's argmax": _share(report.label_agreement),
            "measured": f"{report.created:%Y-%m-%d}",
        }
        for report in subject.reports
    ]
    drafts = "`untrained` is the same draft before training, `bigram` a table of pairs of tokens: both cost nothing."
    return _section("How it was measured", render_table(rows), drafts)


def _limits(subject: CardSubject) -> str:
    limits = [
        "Made for the target above and its tokenizer. With another model, a fine-tuned one too, acceptance has to be measured anew.",
        "Measured on the eval sets above: other tasks and languages are accepted at other rates.",
    ]
    vocabulary = subject.made_from.options.get("draft_vocab_size")
    if vocabulary is not None and vocabulary < subject.target.vocab_size:
        limits.append(
            f"Proposes {vocabulary:,} of the target's {subject.target.vocab_size:,} tokens, the others never."
        )
    found = {report.exactness for report in subject.reports}
    if found - {Exactness.EXACT, Exactness.ROUNDING}:
        limits.append(
            "Rungs 2 and 3 are exact only if all answer tokens are the target's argmax, which is not so, or not known, here."
        )
    elif Exactness.ROUNDING in found:
        limits.append(
            "Rungs 2 and 3 are exact but for rounding: the target wrote the answers, greedily, and near ties may be decided "
            "either way."
        )
    limits += dict.fromkeys(filter(None, map(_contexts, subject.reports)))
    if any(score.rung == 4 for report in subject.reports for score in report.scores):
        limits.append("Speed-ups are of one prompt at a time on the machine that measured, not of a server under load.")
    return _section("Limits", "\n".join(f"* {limit}" for limit in limits))


def _contexts(report: ReportSummary) -> str:
    """Return whose contexts the scores of rung 1 above temperature 0 are of; an empty text without one."""
    simulated = [score.decoding for score in report.scores if score.rung == 1 and score.decoding is not None]
    return describe_contexts(simulated, report.answers)


def _provenance(subject: CardSubject) -> str:
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
    return _section("Provenance", _pairs({name: digest for name, digest in rows.items() if digest}, "digest of"))


def _lengths(report: ReportSummary) -> list[RungScore]:
    """Return the scores of the trained draft on rungs that count tokens."""
    return [score for score in report.scores if score.draft == TRAINED and score.rung > 0]


def _known(report: ReportSummary, rung: int) -> list[RungScore]:
    return [score for score in report.select_scores(TRAINED, rung) if score.value is not None]


def _cell(score: RungScore | None) -> str:
    if score is None or score.value is None:
        return ""
    value = _number(score.value) if score.rung == 0 else _value(score)
    return value + ("" if score.speed_up is None else f", {score.speed_up:.2f}× plain decoding")


def _value(score: RungScore) -> str:
    """Over one prompt an interval has no width, which would look like certainty."""
    if score.low is None or score.high is None or score.prompts == 1:
        return format_length(score.value)
    return f"{format_length(score.value)} ({format_interval(score.low, score.high, between='–')})"


def _confidence(report: ReportSummary) -> str:
    levels = {score.confidence for score in report.scores if score.confidence is not None}
    return f"{max(levels):.0%} intervals over prompts" if levels else "no intervals: no passes were counted"


def _prompts(report: ReportSummary) -> str:
    counts = {score.rung: f"{score.prompts:,}" for score in _lengths(report) if score.prompts is not None}
    return ", ".join(f"{count} (rung {rung})" for rung, count in counts.items()) or "not counted"


def _share(share: float | None) -> str:
    """Return a percentage, rounded down, so that only 1.0 is 100%."""
    return "not known" if share is None else f"{int(share * 10_000) / 100:.2f}%"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _numbers(value: float | list[float]) -> str:
    """Return one number, or one per position."""
    return ", ".join(map(_number, value)) if isinstance(value, list) else _number(value)


def _section(title: str, *parts: str) -> str:
    return "\n\n".join([f"## {title}", *parts])


def _pairs(rows: Mapping[str, Any], name: str = "") -> str:
    return render_table([{name or "what": key, "value": value} for key, value in rows.items()])
