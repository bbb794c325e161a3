"""The command `draftworks slices`: which slices of the eval sets fell since a draft was promoted, and weights for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftworks.config.registry_files import TargetSpec
from draftworks.data.slices import DEFAULT_MAX_WEIGHT, SLICE_COLUMNS, SlicePlan, save_plan
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.evaluation.report import text_tables
from draftworks.evaluation.report.text_tables import TextTable, print_table, print_text
from draftworks.programs.start import CHECKOUT, report_error
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.records import ReportIdentity
from draftworks.storage.words import suggest_or_list
from draftworks.targets.registry import Registry

if TYPE_CHECKING:
    from draftworks.evaluation.report.slice_changes import SliceChange
    from draftworks.fleet.slice_history import SliceHistory


def slices(
    target: Annotated[str, typer.Argument(help="The registry's name of the model.")],
    strategy: Annotated[str, typer.Argument(help="eagle3, dflash and their like.")],
    draft: Annotated[
        str | None, typer.Option("--draft", help="Digest of the draft; by default the one in service.")
    ] = None,
    eval_set: Annotated[str | None, typer.Option("--eval-set", help="One eval set; by default all.")] = None,
    least: Annotated[int, typer.Option("--least-prompts", min=2, help="Prompts below which a slice is left out.")] = 20,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Write weights of the slices that fell, none where none fell, for mix.weights."),
    ] = None,
    max_weight: Annotated[
        float, typer.Option("--max-weight", help="Most that a slice may weigh, 1 to 10.")
    ] = DEFAULT_MAX_WEIGHT,
    served: Annotated[
        bool, typer.Option("--served", help="By the logs of requests (observation.requests), without an evaluation.")
    ] = False,
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = CHECKOUT / "registry",
) -> None:
    """Show which slices accept less than at promotion, by language, length, thinking and source; --save weighs them."""
    from draftworks.fleet.slice_history import SliceHistory

    try:
        found = Registry(registry)
        spec = found.load_target(target)
        if strategy not in spec.strategies:
            raise ConfigError(f"target {target} does not use {strategy}; {suggest_or_list(strategy, spec.strategies)}")
        artifacts = ArtifactStore(found.resolve_var_folder())
        if served:
            _show_served(spec, found.root, artifacts, strategy, save, max_weight)
            return
        history = SliceHistory(artifacts, target, strategy)
        chosen = draft or history.find_draft_in_service()
        report = history.find_newest(chosen)
        if report is None:
            raise StoreError(f"target {target}, {strategy}: draft {chosen} has no report: draftworks run evaluate")
        reference = history.require_reference(chosen)
        wanted = _choose_eval_sets(history, report, reference, eval_set, save is not None)
        for name in wanted:
            changes = _show(history, report, reference, name, least)
            if save is not None:
                _save(
                    save,
                    changes,
                    SlicePlan(target, strategy, name, report.path.name, reference.path.name, 1.0, ()),
                    max_weight,
                )
        newest = report if draft is not None else history.find_newest()
        assert newest is not None, "one report at least was shown"
        _show_weighted(history, newest, chosen)
    except DraftworksError as error:
        raise report_error(error) from None


def _show_served(
    target: TargetSpec, root: Path, artifacts: ArtifactStore, strategy: str, save: Path | None, max_weight: float
) -> None:
    """Show the slices of logged requests beside the draft's first hours, and weigh those that fell."""
    from draftworks.production.served_logs import read_served_logs
    from draftworks.production.served_view import list_log_notes, to_slice_changes

    logs = read_served_logs(target, root, artifacts, strategy)
    if not logs.standings:
        raise StoreError(f"target {target.name}, {strategy}: no request to compare: {'; '.join(list_log_notes(logs))}")
    [standing] = logs.standings
    if not standing.baseline_over:
        raise StoreError(
            f"target {target.name}, {strategy}: the first hours of draft {standing.draft} are not over: nothing to compare with"
        )
    changes = to_slice_changes(standing)
    print_text(f"requests to draft {standing.draft} now against its first hours; rung 6")
    _print_changes(changes)
    print_text(f"fell: {', '.join(each.name for each in standing.fallen) or 'none'} (corrected by Holm)")
    if save is not None and standing.promise is None:
        raise StoreError(f"weights name the report of the draft that they are for: {standing.problem}")
    if save is not None and standing.promise is not None:
        promise = standing.promise
        about = SlicePlan(target.name, strategy, promise.eval_set, promise.report, promise.report, 1.0, ())
        _save(save, tuple(each for each in changes if each.column in SLICE_COLUMNS), about, max_weight)


def _choose_eval_sets(
    history: SliceHistory, report: Artifact, reference: Artifact, wanted: str | None, one_only: bool
) -> list[str]:
    """Return the eval sets of both reports, or the wanted one of them."""
    both = [name for name in history.list_eval_sets(report) if name in history.list_eval_sets(reference)]
    if wanted is not None and wanted not in both:
        raise ConfigError(f"eval set {wanted}: not in both reports; {suggest_or_list(wanted, both)}")
    if wanted is None and one_only and len(both) > 1:
        raise ConfigError(f"weights are made from one eval set: choose with --eval-set among {', '.join(both)}")
    return both if wanted is None else [wanted]


def _show(
    history: SliceHistory, report: Artifact, reference: Artifact, eval_set: str, least: int
) -> tuple[SliceChange, ...]:
    from draftworks.evaluation.report.comparison import WalkPair
    from draftworks.evaluation.report.slice_changes import compare_slices

    print_text(f"{eval_set}: report {report.path.name} against {reference.path.name}, that of the promotion; rung 3")
    if report.path.name == reference.path.name:
        typer.echo("nothing was measured since the promotion: draftworks run evaluate")
        return ()
    new, old = (history.read_measured(one, eval_set) for one in (report, reference))
    pair = WalkPair(new, old, new.resampling)
    if new.draft == old.draft and new.measured == old.measured and pair.shared == new.measured.keys():
        typer.echo("the same draft on the same prompts: no slice can have changed")
        return ()
    changes = compare_slices(new, old, least_prompts=least)
    if not changes:
        typer.echo("its data has no column with two values or more among language, prompt_length, thinking and source")
        return ()
    _print_changes(changes)
    fell = [f"{one.column} {one.value}" for one in changes if one.verdict == "fell"]
    compared = sum(one.compared is not None for one in changes)
    print_text(f"fell: {', '.join(fell) or 'none'} ({compared} slices compared, corrected by Holm)")
    return changes


def _print_changes(changes: Iterable[SliceChange]) -> None:
    """Print a table of slices; into a file or a pipe as Markdown."""
    from draftworks.evaluation.report.pages import render_table

    rows = [one.to_row() for one in changes]
    if text_tables.find_terminal_width() is not None:
        print_table(build_slices_table(rows))
    else:
        typer.echo(render_table(rows))


def build_slices_table(rows: Sequence[Mapping[str, str]]) -> TextTable:
    """Build the table of how slices have changed."""
    return TextTable.of("", rows, right=frozenset(("prompts", "before", "now")), heads=2)


def _save(path: Path, changes: tuple[SliceChange, ...], about: SlicePlan, max_weight: float) -> None:
    """Write what is to be weighted by the newest figures; without figures a file from before stays as it is."""
    from draftworks.evaluation.report.slice_changes import plan_weights

    if all(one.compared is None for one in changes):
        typer.echo(f"no slice could be compared: {path} is {'left as it is' if path.exists() else 'not written'}")
        return
    plan = plan_weights(changes, about, max_weight)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_plan(path, plan)
    for one in plan.weights:
        typer.echo(f"{one.column} {one.value}: x {one.weight:g}")
    typer.echo(f"written: {path}{'' if plan.weights else ', without a weight: no slice fell'}")


def _show_weighted(history: SliceHistory, report: Artifact, chosen: str) -> None:
    """Show whether weights have helped the draft of a report, which may be newer than the chosen one."""
    from draftworks.fleet.slice_history import summarize_weighted

    try:
        found = history.find_weighted(report)
    except DraftworksError as error:
        typer.echo(f"whether the weights have helped is not known: {error}")
        return
    if found is not None:
        draft = str(ReportIdentity.of(report).draft_identity)
        typer.echo(f"\ndraft {draft}{'' if draft == chosen else ', not in service'}. {summarize_weighted(found)}")
        typer.echo(f"{found.plan.eval_set}: report {report.path.name} against {found.plan.report}, that of the weights")
        _print_changes(found.changes)
