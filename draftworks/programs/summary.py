"""`draftworks summary`: what exists for a target, and the acceptance of its drafts."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from draftworks.errors import DraftworksError
from draftworks.evaluation.acceptance_length import NAME, SYMBOL, format_length
from draftworks.evaluation.report.sampled import describe_rates, list_sampled_acceptance
from draftworks.evaluation.report.summary import TRAINED, ReportSummary
from draftworks.evaluation.strategy_metrics import describe_strategy_metrics
from draftworks.programs.start import CHECKOUT_REGISTRY, RegistryOption
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.asset_names import of_strategy
from draftworks.targets.registry import HELDOUT, Registry

SIMULATED_METRIC = "eval/simulated_acc_len"
WALK_METRIC, LOOP_METRIC = "eval/rung3_walk_acc_len", "eval/rung4_loop_t0_acc_len"


def summary(target: str, registry: RegistryOption = CHECKOUT_REGISTRY) -> None:
    """Show what exists for a target: every result, and the acceptance of its drafts."""
    console = Console(width=None if Console().is_terminal else 120)
    try:
        found = Registry(registry)
        spec = found.load_target(target)
        artifacts = ArtifactStore(found.resolve_var_folder())
        results = build_results_table(target, artifacts)
        if not results.row_count:
            console.print(f"target {target}: nothing made yet. Run the job `everything` for this partition.")
            return
        console.print(results)
        for strategy in spec.strategies:
            report = artifacts.find(of_strategy(strategy).report, target)
            if report is not None:
                console.print(build_acceptance_table(strategy, report))
                if list_sampled_acceptance(strategy, report.summary["drafts"]["trained"]):
                    console.print(build_sampled_table(strategy, report))
            draft = artifacts.find(of_strategy(strategy).draft, target)
            if draft is not None and describe_strategy_metrics(draft.summary["heldout"]):
                console.print(build_strategy_metrics_table(strategy, draft))
    except DraftworksError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def build_results_table(target: str, artifacts: ArtifactStore) -> Table:
    """Build a table with a row per asset that has a result, oldest first."""
    table = Table(title=f"target {target}", title_justify="left")
    for column in ("asset", "digest", "made", "seconds", "what"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    existing = [artifacts.find(folder.name, target) for folder in sorted(artifacts.root.glob("*/")) if folder.is_dir()]
    for artifact in sorted((a for a in existing if a is not None), key=lambda a: a.created):
        made = datetime.fromtimestamp(artifact.created).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(
            artifact.asset, artifact.path.name, made, f"{artifact.seconds:.1f}", format_summary_values(artifact)
        )
    return table


def format_summary_values(artifact: Artifact) -> str:
    """Format the main values of a result's summary as one line."""
    wanted = (
        "conversations",
        "samples",
        "tokens",
        "supervised_share",
        "bytes_per_token",
        "coverage",
        "heldout_coverage",
        "steps",
        "tokens_per_second",
        "tokens_per_s",
    )
    return ", ".join(f"{key} {_short(artifact.summary[key])}" for key in wanted if key in artifact.summary)


def build_acceptance_table(strategy: str, report: Artifact) -> Table:
    """Build a table with a row for the trained draft, the same draft untrained, and the bigram baseline."""
    drafts: dict[str, dict[str, Any]] = report.summary["drafts"]
    positions = max(len(metrics["eval/per_position_acc"]) for metrics in drafts.values())
    table = Table(title=f"{strategy}: held-out acceptance", title_justify="left", caption_justify="left")
    table.caption = (
        f"{NAME}, the target's own token counted, {report.summary['draft_tokens']} proposed per pass: simulated (rung 1 of "
        "the acceptance ladder), walk (greedy serving replayed, rung 3), loop (real decoding, rung 4); acc_i: accuracy at "
        f"position i (rung 0).{_describe_prompts(report)}"
    )
    rungs = {"simulated": SIMULATED_METRIC, "walk": WALK_METRIC, "loop": LOOP_METRIC}
    lengths = [f"{SYMBOL} {rung}" for rung in rungs]
    for column in ("draft", *lengths, *(f"acc_{position + 1}" for position in range(positions))):
        table.add_column(column, justify="left" if column == "draft" else "right")
    for name, metrics in sorted(drafts.items(), key=lambda item: -item[1][SIMULATED_METRIC]):
        shown = [format_length(metrics.get(metric), 3, none="") for metric in rungs.values()]
        table.add_row(name, *shown, *(f"{accuracy:.3f}" for accuracy in metrics["eval/per_position_acc"]))
    return table


def build_sampled_table(strategy: str, report: Artifact) -> Table:
    """Build a table with a row per temperature and rule of acceptance, of the trained draft."""
    table = Table(title=f"{strategy}: above temperature 0, by the rule of each server", title_justify="left")
    table.caption = "simulated (rung 1) is over the contexts of the stored answers; loop (rung 4) decodes"
    table.caption_justify = "left"
    for column in ("decoding", "rule", "servers", "simulated", "loop"):
        table.add_column(column, justify="right" if column in ("simulated", "loop") else "left")
    for one in list_sampled_acceptance(strategy, report.summary["drafts"]["trained"]):
        figures = ("" if value is None else format_length(value, 3) for value in (one.simulated, one.loop))
        table.add_row(one.decoding.describe(), one.decoding.rule, one.servers, *figures)
    return table


def _describe_prompts(report: Artifact) -> str:
    """Return on how many prompts the loop is, where these are not those of the walk: the two do not compare then."""
    found = ReportSummary.load(report.path / HELDOUT)
    [walked, *_], [decoded, *_] = ([*_list_prompts(found, rung), None] for rung in (3, 4))
    if walked is None or decoded is None or walked == decoded:
        return ""
    return f" The loop is of {decoded:,} of the walk's {walked:,} prompts; report.md has the walk of the same ones."


def _list_prompts(report: ReportSummary, rung: int) -> list[int | None]:
    return [score.prompts for score in report.select_scores(TRAINED, rung) if not score.temperature]


def build_strategy_metrics_table(strategy: str, draft: Artifact) -> Table:
    """Build a table of the strategy's own metrics (docs/strategies.md), with a column per draft position."""
    metrics = {
        k: v if isinstance(v, list) else [v] for k, v in describe_strategy_metrics(draft.summary["heldout"]).items()
    }
    table = Table(title=f"{strategy}: its own metrics, of the published draft", title_justify="left")
    table.caption = describe_rates(strategy, {f"eval/{name}": value for name, value in metrics.items()}) or None
    table.add_column("metric")
    for position in range(max(map(len, metrics.values()))):
        table.add_column(str(position + 1), justify="right")
    for name, values in metrics.items():
        table.add_row(name, *(f"{value:.3f}" for value in values))
    return table


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
