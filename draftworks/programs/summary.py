"""`draftworks summary`: what exists for a target, and the acceptance of its drafts."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from draftworks.errors import DraftworksError
from draftworks.evaluation.strategy_metrics import select_strategy_metrics
from draftworks.programs.start import CHECKOUT_REGISTRY, RegistryOption, report_error
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.asset_names import of_strategy
from draftworks.targets.registry import Registry

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
            draft = artifacts.find(of_strategy(strategy).draft, target)
            if draft is not None and select_strategy_metrics(draft.summary["heldout"]):
                console.print(build_strategy_metrics_table(strategy, draft))
    except DraftworksError as error:
        raise report_error(error) from None


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
        f"accepted draft tokens per pass of the target, {report.summary['draft_tokens']} proposed: simulated (rung 1 of "
        "the acceptance ladder), replayed greedy serving (rung 3), real decoding (rung 4); acc_i: accuracy at position i "
        "(rung 0)"
    )
    rungs = {"simulated": "eval/simulated_acc_len", "walk": WALK_METRIC, "loop": LOOP_METRIC}
    for column in ("draft", *rungs, *(f"acc_{position + 1}" for position in range(positions))):
        table.add_column(column, justify="left" if column == "draft" else "right")
    for name, metrics in sorted(drafts.items(), key=lambda item: -item[1]["eval/simulated_acc_len"]):
        values = [metrics.get(metric) for metric in rungs.values()] + metrics["eval/per_position_acc"]
        table.add_row(name, *("" if value is None else f"{value:.3f}" for value in values))
    return table


def build_strategy_metrics_table(strategy: str, draft: Artifact) -> Table:
    """Build a table of the strategy's own metrics (docs/strategies.md), with a column per draft position."""
    metrics = {
        k: v if isinstance(v, list) else [v] for k, v in select_strategy_metrics(draft.summary["heldout"]).items()
    }
    table = Table(title=f"{strategy}: its own metrics, of the published draft", title_justify="left")
    table.add_column("metric")
    for position in range(max(map(len, metrics.values()))):
        table.add_column(str(position + 1), justify="right")
    for name, values in metrics.items():
        table.add_row(name, *(f"{value:.3f}" for value in values))
    return table


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
