"""Decides about the draft in service of a target: its losses by the rule, in words, with the cost of each choice."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from draftworks.config.operations import DecisionSpec
from draftworks.decision.figures import ServedFigures
from draftworks.decision.record import Choice, Decision, EvalLoss, Margins, Reference
from draftworks.decision.rule import Verdict, decide
from draftworks.errors import ConfigError
from draftworks.evaluation.acceptance_length import NAME, format_length
from draftworks.evaluation.report.plots import COLOURS, label_axes, make_figure, render_png
from draftworks.service.promotion import Service
from draftworks.storage.identity import digest
from draftworks.storage.words import format_count

MEANINGS = {
    Choice.KEEP: "keep the draft in service",
    Choice.TUNE: "tune: go on training the draft in service, with the data of today",
    Choice.RETRAIN: "retrain: train a draft from the start",
    Choice.UNDECIDED: "undecided",
}
REFERENCES = {
    Reference.SAME_PROMPTS: "on the same prompts",
    Reference.BOTH_DRAFTS: "both drafts measured on the new eval data",
    Reference.FORMER_FIGURE: "former figure, of other prompts",
    Reference.FIRST_HOURS: "since the draft's first hours in service, on other requests",
    Reference.NONE: "nothing to compare with",
}


@dataclass(frozen=True)
class Decider:
    """Decides about the draft in service of one strategy of a target, as the target's section `decision` says."""

    service: Service
    settings: DecisionSpec

    @classmethod
    def of(cls, service: Service) -> Decider:
        """Return the decider of a target. Raises ConfigError if its entry has no section `decision`."""
        settings = service.target.decision
        if settings is None:
            raise ConfigError(
                f"target {service.target.name}: has no section `decision`: add one to its entry, {{}} for the defaults"
            )
        if service.strategy not in service.target.strategies:
            raise ConfigError(
                f"target {service.target.name} does not use {service.strategy}; it has "
                f"{', '.join(service.target.strategies)}"
            )
        return cls(service, settings)

    def decide(self) -> Decision:
        """Return the decision; nothing is written.

        Raises:
            StoreError: no draft is in service, or a record or report is damaged.
            NotMeasuredError: the draft in service is not measured on what is there now.
        """
        figures = ServedFigures.of(self.service)
        evidence = figures.gather()
        margins = Margins(self.settings.tune_margin, self.settings.retrain_margin, self.settings.least_prompts)
        verdict = decide(evidence.losses, margins)
        return Decision(
            target=self.service.target.name,
            strategy=self.service.strategy,
            choice=verdict.choice,
            draft=evidence.draft.digest,
            target_digest=self.service.files.digest,
            subject=digest([evidence.subject, margins.tune, margins.retrain, margins.least_prompts]),
            figures=verdict.figures,
            reasons=explain(verdict),
            margins=margins,
            costs=figures.lineage.read_costs(),
            after_tune=verdict.after_tune,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def explain(verdict: Verdict) -> tuple[str, ...]:
    """Return why, in words: a sentence for each eval set, and one for a tune that did not help."""
    reasons = [describe_loss(each) for each in verdict.figures]
    if verdict.after_tune is not None:
        reasons.append(
            f"draft {verdict.after_tune} is a tune for the same change and did not help: train from the start"
        )
    return tuple(reasons)


def describe_loss(found: EvalLoss) -> str:
    """Return one line about an eval set."""
    if found.loss is None or found.low is None or found.high is None:
        return f"{found.eval_set}: {found.choice}: {found.reason}"
    what = "request" if found.reference is Reference.FIRST_HOURS else "prompt"
    said = (
        f"{found.eval_set}: {found.choice}: lost {found.loss:+.3f} accepted tokens per pass ({found.low:+.3f} to "
        f"{found.high:+.3f}, {format_count(found.prompts, what)}), {NAME} {format_length(found.reference_value, 3)} "
        f"to {format_length(found.value, 3)}; "
        f"{REFERENCES[found.reference]}, reference draft {found.reference_draft}"
    )
    return said + (f"; {found.reason}" if found.reason else "")


def describe_decision(decision: Decision) -> str:
    """Return the decision as lines of text: choice, reasons, margins, costs."""
    margins = decision.margins
    return "\n".join(
        [
            f"{decision.target}, {decision.strategy}, draft {decision.draft}: {MEANINGS[decision.choice]}",
            *decision.reasons,
            f"margins: tuned above {margins.tune:g}, trained from the start above {margins.retrain:g}; at least "
            f"{format_count(margins.least_prompts, 'prompt')}",
            f"cost: a tune {format_hours(decision.costs.tune)}, a training from the start "
            f"{format_hours(decision.costs.retrain)}",
        ]
    )


def format_hours(hours: float | None) -> str:
    return "not known yet" if hours is None else f"{hours:.3g} GPU-hours"


COLOUR_OF = {
    Choice.KEEP: COLOURS[2],
    Choice.UNDECIDED: COLOURS[4],
    Choice.TUNE: COLOURS[1],
    Choice.RETRAIN: COLOURS[5],
}
MARKER_OF = {Choice.KEEP: "o", Choice.UNDECIDED: "D", Choice.TUNE: "^", Choice.RETRAIN: "s"}


def plot_decision(decision: Decision) -> bytes:
    """Plot the eval sets in their order from above, the margins as lines."""
    figures, margins = decision.figures, decision.margins
    figure = make_figure(7.2, 1.7 + 0.4 * len(figures))
    axes = figure.add_subplot()
    for row, found in enumerate(figures):
        if found.loss is None or found.low is None or found.high is None:
            axes.text(0, row, "  nothing to compare with", va="center", fontsize=8)
            continue
        colour = COLOUR_OF[found.choice]
        axes.hlines(row, found.low, found.high, color=colour, linewidth=3, alpha=0.5)
        axes.plot([found.loss], [row], color=colour, marker=MARKER_OF[found.choice], linestyle="")
    axes.axvline(margins.tune, color=COLOURS[1], linestyle="--", label=f"tune above {margins.tune:g}")
    axes.axvline(margins.retrain, color=COLOURS[5], linestyle=":", label=f"retrain above {margins.retrain:g}")
    axes.axvline(0, color="black", linewidth=0.8)
    names = [f"{found.eval_set}: {found.choice}  (n = {found.prompts:,})" for found in figures]
    axes.set_yticks(range(len(figures)), names)
    axes.set_ylim(len(figures) - 0.5, -0.5)
    title = f"{decision.target}, {decision.strategy}, draft {decision.draft}: {decision.choice}"
    label_axes(axes, title, f"loss of {NAME} (95% interval)", "")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return render_png(figure)
