"""The commands `draftworks summary`, `leaderboard` and `compare`: what exists, and the acceptance of drafts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftworks.errors import ConfigError, DraftworksError
from draftworks.evaluation.acceptance_length import NAME, NOTE, SYMBOL, format_length
from draftworks.evaluation.report import text_tables
from draftworks.evaluation.report.summary import TRAINED, ReportSummary
from draftworks.evaluation.report.text_tables import TextTable, print_table, print_text
from draftworks.evaluation.strategy_metrics import describe_rates, describe_strategy_metrics, list_sampled_acceptance
from draftworks.fleet.leaderboard import CAPTION, Fleet, Standing, cells, markdown
from draftworks.programs.start import CHECKOUT, CHECKOUT_REGISTRY, RegistryOption, report_error
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.names import of_strategy
from draftworks.targets.registry import HELDOUT, Registry

if TYPE_CHECKING:
    from draftworks.fleet.draft_comparison import DraftComparison


SIMULATED_METRIC = "eval/simulated_acc_len"
ACCURACY_METRIC = "eval/per_position_acc"
WALK_METRIC, LOOP_METRIC = "eval/rung3_walk_acc_len", "eval/rung4_loop_t0_acc_len"


def summary(target: str, registry: RegistryOption = CHECKOUT_REGISTRY) -> None:
    """Show what exists for a target: every result, and the acceptance of its drafts."""
    try:
        found = Registry(registry)
        spec = found.load_target(target)
        artifacts = ArtifactStore(found.resolve_var_folder())
        results = build_results_table(target, artifacts)
        if not results.rows:
            print_text(f"target {target}: nothing made yet: draftworks run everything --target {target}")
            return
        print_table(results)
        for strategy in spec.strategies:
            report = artifacts.find(of_strategy(strategy).report, target)
            if report is not None:
                print_table(build_acceptance_table(strategy, report))
                if list_sampled_acceptance(strategy, report.summary["drafts"]["trained"]):
                    print_table(build_sampled_table(strategy, report))
            draft = artifacts.find(of_strategy(strategy).draft, target)
            if draft is not None and describe_strategy_metrics(draft.summary["heldout"]):
                print_table(build_strategy_metrics_table(strategy, draft))
            export = artifacts.find(of_strategy(strategy).export, target)
            if export is not None:
                print_text(f"{strategy}: its files for servers are in {os.path.relpath(export.path)}")
        for verdict in describe_verdicts(spec.strategies, target, artifacts):
            print_text(verdict)
    except DraftworksError as error:
        raise report_error(error) from None


def describe_verdicts(strategies: Iterable[str], target: str, artifacts: ArtifactStore) -> Iterator[str]:
    """Yield what each draft is worth beside what costs nothing, a sentence for each eval set."""
    for strategy in strategies:
        report = artifacts.find(of_strategy(strategy).report, target)
        for name, verdict in ({} if report is None else ReportSummary.load_verdicts(report)).items():
            warning = "" if verdict.beats_it else "WARNING "
            yield f"{warning}{strategy} on {name}: {verdict.describe()}"


def build_results_table(target: str, artifacts: ArtifactStore) -> TextTable:
    """Build a table with a row per asset that has a result, oldest first."""
    rows = []
    existing = [artifacts.find(folder.name, target) for folder in sorted(artifacts.root.glob("*/")) if folder.is_dir()]
    for artifact in sorted((a for a in existing if a is not None), key=lambda a: a.created):
        made = datetime.fromtimestamp(artifact.created).strftime("%Y-%m-%d %H:%M:%S")
        rows.append((artifact.asset, artifact.path.name, made, f"{artifact.seconds:.1f}", format_values(artifact)))
    columns = ("asset", "digest", "made", "seconds", "what")
    number, digest = frozenset(("seconds",)), frozenset(("digest",))
    return TextTable(f"target {target}", columns, tuple(rows), right=number, digests=digest)


def format_values(artifact: Artifact) -> str:
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


def build_acceptance_table(strategy: str, report: Artifact) -> TextTable:
    """Build a table with a row for the trained draft, the same draft untrained, and each that costs nothing."""
    drafts: dict[str, dict[str, Any]] = report.summary["drafts"]
    positions = max(len(metrics.get(ACCURACY_METRIC, ())) for metrics in drafts.values())
    caption = (
        f"{NAME}, the target's own token counted, {report.summary['draft_tokens']} proposed per pass: simulated (rung 1 of "
        "the acceptance ladder), walk (greedy serving replayed, rung 3), loop (real decoding, rung 4); acc_i: accuracy at "
        f"position i (rung 0).{_describe_prompts(report)}"
    )
    rungs = {"simulated": SIMULATED_METRIC, "walk": WALK_METRIC, "loop": LOOP_METRIC}
    lengths = [f"{SYMBOL} {rung}" for rung in rungs]
    columns = ("draft", *lengths, *(f"acc_{position + 1}" for position in range(positions)))
    rows = []
    for name, metrics in sorted(drafts.items(), key=lambda item: -_rank(item[1])):
        shown = [format_length(metrics.get(metric), 3, none="") for metric in rungs.values()]
        accuracies = [f"{accuracy:.3f}" for accuracy in metrics.get(ACCURACY_METRIC, ())]
        rows.append((name, *shown, *accuracies, *[""] * (positions - len(accuracies))))
    title = f"{strategy}: held-out acceptance"
    return TextTable(title, columns, tuple(rows), caption, right=frozenset(columns[1:]))


def _rank(metrics: Mapping[str, Any]) -> float:
    """Return the walk, or the simulated length where there is none, as in reports from before bigrams had one."""
    found = (metrics[name] for name in (WALK_METRIC, SIMULATED_METRIC) if metrics.get(name) is not None)
    return next(found, 0.0)


def build_sampled_table(strategy: str, report: Artifact) -> TextTable:
    """Build a table with a row per temperature and rule of acceptance, of the trained draft."""
    columns = ("decoding", "rule", "servers", f"{SYMBOL} simulated", f"{SYMBOL} loop")
    rows = []
    for one in list_sampled_acceptance(strategy, report.summary["drafts"]["trained"]):
        figures = (format_length(value, 3, none="") for value in (one.simulated, one.loop))
        rows.append((one.decoding.describe(), one.decoding.rule or "", one.servers, *figures))
    title = f"{strategy}: above temperature 0, by the rule of each server"
    caption = "simulated (rung 1) is over the contexts of the stored answers; loop (rung 4) decodes"
    return TextTable(title, columns, tuple(rows), caption, right=frozenset(columns[3:]), heads=3)


def _describe_prompts(report: Artifact) -> str:
    """Return on how many prompts the loop is, where these are not those of the walk: the two do not compare then."""
    if LOOP_METRIC not in report.summary["drafts"][TRAINED]:
        return ""
    found = ReportSummary.load(report.path / HELDOUT)
    [walked, *_], [decoded, *_] = ([*_list_prompts(found, rung), None] for rung in (3, 4))
    if walked is None or decoded is None or walked == decoded:
        return ""
    return f" The loop is of {decoded:,} of the walk's {walked:,} prompts; report.md has the walk of the same ones."


def _list_prompts(report: ReportSummary, rung: int) -> list[int | None]:
    return [score.prompts for score in report.select_scores(TRAINED, rung) if not score.temperature]


def build_strategy_metrics_table(strategy: str, draft: Artifact) -> TextTable:
    """Build a table of the strategy's own metrics (docs/strategies.md), with a column per draft position."""
    metrics = {
        k: v if isinstance(v, list) else [v] for k, v in describe_strategy_metrics(draft.summary["heldout"]).items()
    }
    positions = max(map(len, metrics.values()))
    columns = ("metric", *(str(position + 1) for position in range(positions)))
    rows = [
        (name, *(f"{value:.3f}" for value in values), *("" for _ in range(positions - len(values))))
        for name, values in metrics.items()
    ]
    title = f"{strategy}: its own metrics, of the published draft"
    caption = describe_rates(strategy, draft.summary["heldout"])
    return TextTable(title, columns, tuple(rows), caption, right=frozenset(columns[1:]))


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


DraftArgument = Annotated[
    str, typer.Argument(help="TARGET/STRATEGY (the newest), TARGET/STRATEGY/DIGEST, a digest, or a report's folder.")
]


def compare(
    a: DraftArgument,
    b: DraftArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a page with a picture: FILE.html, or FILE.md and FILE.png.")
    ] = None,
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = CHECKOUT / "registry",
) -> None:
    """Compare two drafts: recipes, data, figures with paired intervals, slices, sizes and costs. Reads records only."""
    from draftworks.fleet.compared_drafts import find_compared_draft
    from draftworks.fleet.comparison_page import describe_comparison, render_markdown
    from draftworks.fleet.draft_comparison import compare_drafts

    try:
        if out is not None and out.suffix not in (".html", ".md"):
            raise ConfigError(f"--out {out}: expected a name that ends in .html or .md")
        artifacts = ArtifactStore(Registry(registry).resolve_var_folder())
        found = compare_drafts(find_compared_draft(a, artifacts), find_compared_draft(b, artifacts))
        if out is not None:
            _write_page(out, found)
    except (DraftworksError, OSError) as error:
        raise report_error(error) from None
    width = text_tables.find_terminal_width()
    typer.echo(json.dumps(describe_comparison(found), indent=2) if as_json else render_markdown(found, width=width))


def _write_page(out: Path, found: DraftComparison) -> None:
    """Write the page as HTML or Markdown, by the file's name; a Markdown page has its picture beside it."""
    from draftworks.fleet.comparison_page import plot_differences, render_html, render_markdown
    from draftworks.storage.files import publish_file

    picture = plot_differences(found)
    if out.suffix == ".html":
        text = render_html(found, picture)
    else:
        image = out.with_suffix(".png")
        if picture is not None:
            with publish_file(image) as staging:
                staging.write_bytes(picture)
        text = render_markdown(found, None if picture is None else image.name)
    with publish_file(out) as staging:
        staging.write_text(text, encoding="utf-8")


def leaderboard(registry: RegistryOption = CHECKOUT_REGISTRY) -> None:
    """Show every draft of every target: acceptance, age, the best ever, what it is stale against. In a file, as Markdown."""
    try:
        standings = Fleet.of(Registry(registry)).standings()
    except DraftworksError as error:
        raise report_error(error) from None
    if text_tables.find_terminal_width() is None:
        typer.echo(markdown(standings), nl=False)
        return
    print_table(build_leaderboard(standings, time.time()))


def status(
    targets: Annotated[list[str] | None, typer.Argument(help="Only these; default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Show every draft: promised and served acceptance, and what a person should do, the most urgent first.

    Reads records only: no server is asked, and no file is read for its digest.
    """
    from draftworks.decision.fleet_status import describe_row, list_advice, read_status

    try:
        found = read_status(Registry(registry), targets or None, time.time())
    except DraftworksError as error:
        raise report_error(error) from None
    if as_json:
        typer.echo(json.dumps({"drafts": [one.to_json() for one in found]}))
        return
    if not found:
        print_text(f"{registry}: no target yet: add one to targets/, and draftworks check")
        return
    print_table(TextTable.of("drafts", map(describe_row, found), caption=STATUS_CAPTION))
    for line in list_advice(found):
        print_text(line)


def page(
    out: Annotated[
        Path | None, typer.Option("--out", help="The file; by default fleet/fleet.html among results.")
    ] = None,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Write every draft on one HTML page: promised and served, slices, costs, decisions, commands. No server needed.

    The file needs no other, has no script and no address, and shows no text of a prompt. Reads records only.
    """
    from draftworks.page.contents import read_page
    from draftworks.page.rendering import locate_fleet_page, write_fleet_page

    try:
        found = Registry(registry)
        path = locate_fleet_page(found.resolve_var_folder()) if out is None else out
        write_fleet_page(path, read_page(found, time.time()))
    except (DraftworksError, OSError) as error:
        raise report_error(error) from None
    print_text(f"{path}: open it in a browser")


STATUS_CAPTION = (
    f"{NOTE} Promised: of the draft in service, or else of the newest, on the walk (rung 3). Served: by its servers' own "
    "counters (rung 6) when they were last read; – where none was."
)


def build_leaderboard(standings: Sequence[Standing], now: float) -> TextTable:
    """Build the table with a row per draft; `now` is in seconds since the epoch."""
    rows = (cells(standing, now) for standing in standings)
    digests = frozenset(("draft",))
    return TextTable.of("leaderboard", rows, caption=CAPTION, digests=digests, heads=2)
