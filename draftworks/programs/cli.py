"""The command line `draftworks`. `draftworks run` starts Dagster; the other commands read the registry and results."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from draftworks.config.strategies import resolve_strategy
from draftworks.errors import DraftworksError
from draftworks.evaluation.strategy_metrics import select_strategy_metrics
from draftworks.fleet.leaderboard import Fleet
from draftworks.fleet.leaderboard_views import CAPTION, cells, markdown
from draftworks.programs import (
    acting_commands,
    checking,
    comparing,
    decision_commands,
    doctor,
    engine,
    export_features,
    notify,
    observe,
    planning,
    retention,
    service_commands,
    slice_commands,
    start,
)
from draftworks.programs.keys import FILES, list_keys
from draftworks.programs.start import CHECKOUT_REGISTRY, RegistryOption
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.asset_names import of_strategy
from draftworks.storage.identity import FileDigests
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target

app = typer.Typer(help="Draft models for a fleet of LLMs.", add_completion=False, no_args_is_help=True)
app.command()(checking.check)
app.command()(comparing.compare)
app.command()(doctor.doctor)
app.command()(start.run)
app.command()(start.ui)
app.command()(engine.engine)
app.command()(export_features.export_features)
for command in (retention.usage, retention.prune, retention.pin, retention.unpin):
    app.command()(command)
app.command()(planning.plan)
app.command()(notify.notify)
app.command()(service_commands.promote)
app.command()(service_commands.rollback)
app.command()(service_commands.in_service)
app.command()(decision_commands.decide)
app.command()(observe.observe)
app.command()(slice_commands.slices)
for command in (acting_commands.decisions, acting_commands.accept, acting_commands.hold, acting_commands.release):
    app.command()(command)
WALK_METRIC, LOOP_METRIC = "eval/rung3_walk_acc_len", "eval/rung4_loop_t0_acc_len"


@app.command()
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
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


@app.command("import")
def import_checkpoint(
    source: Annotated[Path, typer.Argument(help="Folder of a draft: ours, speculators, SGLang/SpecForge or z-lab.")],
    out: Annotated[Path, typer.Argument(help="New folder for the draft, best below the registry.")],
    target: Annotated[str, typer.Option(help="The registry's name of the model it drafts for.")],
    norm_output_means: Annotated[
        str | None,
        typer.Option(help="specforge or sglang: by whom `norm_output` of an EAGLE-3 draft is to be understood."),
    ] = None,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Import a checkpoint of other software as a draft, to measure or train it; prints the registry entry for it."""
    from draftworks.export.importing import import_draft

    try:
        found = Registry(registry)
        digests = FileDigests(found.resolve_var_folder() / "digests.json")
        imported = import_draft(
            source, resolve_target(found.load_target(target), found, digests), out, norm_output_means
        )
    except DraftworksError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    defaults = resolve_strategy(imported.strategy).options().model_dump()
    options = {name: value for name, value in imported.options.items() if value != defaults[name]}
    where = os.path.relpath(out.resolve(), found.root.resolve())
    entry = {"strategies": {imported.strategy: {"start_from": where, "options": options, "training": {"max_steps": 0}}}}
    for remark in imported.remarks:
        typer.echo(f"note: {remark}", err=True)
    typer.echo(f"# a draft of the format {imported.format}, measured as it is. For registry/targets/{target}.yaml:")
    typer.echo(yaml.safe_dump(entry, sort_keys=False, default_flow_style=None), nl=False)


@app.command()
def leaderboard(registry: RegistryOption = CHECKOUT_REGISTRY) -> None:
    """Show every draft of every target: acceptance, age, the best ever, what it is stale against. In a file, as Markdown."""
    try:
        standings = Fleet.of(Registry(registry)).standings()
    except DraftworksError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if not Console().is_terminal:
        typer.echo(markdown(standings), nl=False)
        return
    rows = [cells(standing, time.time()) for standing in standings]
    table = Table(title="leaderboard", title_justify="left", caption=CAPTION, caption_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    Console().print(table)


@app.command()
def keys(file: Annotated[str, typer.Argument(help="target, dataset, eval or deployment")] = "target") -> None:
    """List every key of a registry file: type, default, meaning."""
    if file not in FILES:
        typer.echo(f"error: {file!r} is no registry file; there are: {', '.join(FILES)}", err=True)
        raise typer.Exit(1)
    name = Column("key", no_wrap=True)  # a name that is cut off cannot be used
    table = Table(name, "type", "default", "meaning", title=f"registry: {file}", title_justify="left")
    for key in list_keys(file):
        table.add_row(*key)
    Console(width=None if Console().is_terminal else 160).print(table)


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


if __name__ == "__main__":
    app()
