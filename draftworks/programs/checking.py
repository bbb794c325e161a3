"""`draftworks check`, `doctor` and `plan`: what would fail, whether this installation is sound, and what drafts will cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from draftworks.errors import DraftworksError
from draftworks.evaluation.report.text_tables import TextTable, print_table, print_text
from draftworks.planning.plan import Plan, StepActual, add_plans, compare_plan, load_plan, make_plan
from draftworks.planning.plan_table import build_header, build_json, build_rows, describe_beside
from draftworks.planning.subject import PlanSubject
from draftworks.preflight.examine import examine_entry
from draftworks.preflight.findings import SEVERITIES, Finding, Findings
from draftworks.preflight.installation.doctor import LIMIT_S, Installation, probe_ui_port
from draftworks.preflight.installation.machine_probes import Probe, run_probes
from draftworks.preflight.machine import check_writable, find_deployment_warnings
from draftworks.preflight.services import find_refused_jobs, find_storage_problems, list_scheduler_users
from draftworks.programs.start import (
    CHECKOUT,
    LOOPBACK,
    build_dagster_environment,
    is_port_free,
    report_error,
    shorten_paths,
)
from draftworks.storage.identity import FileDigests, ReadOnceDigests
from draftworks.storage.words import format_count
from draftworks.targets.registry import ReadOnceRegistry, Registry

REGISTRY = Path(__file__).resolve().parents[2] / "registry"
_LONGEST_WAIT_S = 10.0
"""For object storage that does not answer; a run waits longer."""


def check(
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = REGISTRY,
    targets: Annotated[list[str] | None, typer.Argument(metavar="TARGET", help="Only these; default: all.")] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", "-t", help="Only this one; may be given several times.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check every target's registry entry, files, drafts and a sample of its data, and print errors and warnings.

    Reads no weights, but those of a GGUF file, which is dequantised once. Schedulers that jobs are to run in are asked whether they would take them, and object storage is
    written to. Exit code 1 if there is an error, else 0.
    """
    found = ReadOnceRegistry(registry)
    try:
        shared = found.find_shared_problems()
        names = list(dict.fromkeys([*(targets or ()), *(target or ())])) or found.list_targets()
        var = None if shared or not _can_be_written(found) else found.resolve_var_folder()
        digests = ReadOnceDigests(FileDigests(None if var is None else var / "digests.json"))
        if not shared:
            shared += find_storage_problems(found, longest_wait_s=_LONGEST_WAIT_S)
        if not names:
            shared.append(f"{registry / 'targets'}: no target: expected a file NAME.yaml for each")
    except DraftworksError as error:
        shared, names, digests, var = [str(error)], [], FileDigests(), None
    warnings = [] if shared else _find_warnings(found, names)
    checked: dict[str, tuple[Finding, ...]] = {}
    refused = find_refused_jobs(found, list_scheduler_users(found, names))
    for name in names:
        entry = [*examine_entry(name, found, digests, var, partial(typer.echo, err=True))]
        entry += [Finding("error", text) for text in refused.get(name, ())]
        checked[name] = tuple(finding for finding in entry if finding.text not in shared)
        if not as_json:
            _print_findings(name, checked[name], registry, len(checked[name]) < len(entry))
    errors = len(shared) + sum(finding.severity == "error" for findings in checked.values() for finding in findings)
    if as_json:
        typer.echo(json.dumps(_to_json(shared, warnings, checked), indent=2))
    else:
        for finding in [*(Finding("error", text) for text in shared), *warnings]:
            typer.echo(f"{finding.severity}: {shorten_paths(finding.text, registry)}")
        everything = [*warnings, *(finding for findings in checked.values() for finding in findings)]
        doubts = sum(finding.severity == "warning" for finding in everything)
        counted = [format_count(errors, "problem") if errors else "no problems"]
        counted += [format_count(doubts, "warning")] if doubts else []
        typer.echo(f"{format_count(len(checked), 'target')} in {registry}: {', '.join(counted)}", err=bool(errors))
    if errors:
        raise typer.Exit(1)


def _can_be_written(registry: Registry) -> bool:
    """Whether what is found out about files can be kept in `var`; where it cannot, a finding says so."""
    findings = Findings()
    check_writable(registry, findings)
    return not findings.errors


def _find_warnings(registry: Registry, names: Sequence[str]) -> list[Finding]:
    """Return what is doubtful for all targets at once."""
    targets = []
    for name in names:
        with suppress(DraftworksError):  # which the target's own findings say
            targets.append(registry.load_target(name))
    return find_deployment_warnings(registry.load_deployment(), targets)


def _print_findings(name: str, findings: tuple[Finding, ...], registry: Path, has_shared: bool) -> None:
    """Print a line for the target, and one below it for each finding, errors first.

    Args:
        has_shared: whether it has problems that it shares with others, which are printed after all targets.
    """
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = sum(finding.severity == "warning" for finding in findings)
    parts = [format_count(count, what) for count, what in ((errors, "problem"), (warnings, "warning")) if count]
    sound = "ok but for the problems below" if has_shared else "ok"
    typer.echo(f"{name}: {', '.join(parts) if errors else ', '.join([sound, *parts])}")
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        for line in finding.text.splitlines():
            typer.echo(f"  {finding.severity}: {shorten_paths(line, registry)}")


def _to_json(shared: list[str], warnings: list[Finding], checked: dict[str, tuple[Finding, ...]]) -> dict[str, object]:
    return {
        "problems": shared,
        "warnings": [finding.text for finding in warnings],
        "targets": {
            name: {
                f"{severity}s": [finding.text for finding in findings if finding.severity == severity]
                for severity in SEVERITIES
            }
            for name, findings in checked.items()
        },
    }


UI_PORT = 3000
_WIDEST_STATE = len("warning")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    port: Annotated[int, typer.Option(help="Of the UI.")] = UI_PORT,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds after which a probe counts as hanging.")] = LIMIT_S,
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = CHECKOUT / "registry",
) -> None:
    """Examine this installation: versions, disk, GPU, SGLang, permissions, Dagster, clocks, storage, secrets.

    Every line is ok, a warning or an error, with what to do. Nothing is changed; secrets are never shown. Exit code 1
    with an error, else 0. `draftworks check` looks at the targets.
    """
    installation = Installation(Registry(registry), build_dagster_environment(), CHECKOUT)
    lines = installation.examine(limit)
    lines += run_probes([Probe("ports", lambda: probe_ui_port(port, is_port_free(port), LOOPBACK))], limit)
    problems, warnings = (sum(line.severity == state for line in lines) for state in ("error", "warning"))
    if as_json:
        found = {"problems": problems, "warnings": warnings, "lines": [asdict(line) for line in lines]}
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in lines:
            _print_line(line)
        typer.echo(f"{format_count(problems, 'problem')}, {format_count(warnings, 'warning')}")
    if problems:
        raise typer.Exit(1)


def _print_line(line: Finding) -> None:
    found = "\n           ".join(line.text.splitlines())
    typer.echo(f"{line.severity:<{_WIDEST_STATE}}  {line.where}: {found}")
    if line.remedy:
        typer.echo(f"{'':<{_WIDEST_STATE}}  -> {line.remedy}")


CHECKOUT_REGISTRY = CHECKOUT / "registry"
CAPTION = (
    "* as the registry has it. Time of what is left to do, one step after the other: most likely value and bounds; "
    "GPU-hours are a step's hours times its GPUs, where a process on the CPU counts as one"
)


def plan(
    targets: Annotated[list[str], typer.Argument(metavar="TARGET", help="One or several; these are added up.")],
    strategy: Annotated[
        list[str] | None, typer.Option("--strategy", help="Only this draft; may be given several times.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="First answer 20 sampled prompts with the target's engine, for about a minute."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = CHECKOUT_REGISTRY,
) -> None:
    """Show what is left to do for a target's drafts: tokens, bytes, hours, money; stored, in fp8, and streamed.

    Without --measure nothing is computed: figures are those of earlier runs, of other targets, or documented ones. What
    exists is left out.
    """
    try:
        found = Registry(registry)
        if measure:
            from draftworks.programs.measuring import measure_target  # pyarrow

            for name in dict.fromkeys(targets):
                measure_target(name, found)
        subjects = [PlanSubject.of(name, found) for name in dict.fromkeys(targets)]
        plans = [make_plan(each, strategy or ()) for each in subjects]
        actual = _compare(subjects[0], plans[0]) if len(subjects) == 1 else ()
        made = plans[0] if len(plans) == 1 else add_plans(plans)
    except DraftworksError as error:
        raise report_error(error) from None
    if as_json:
        typer.echo(json.dumps(build_json(made, actual), indent=2))
        return
    print_table(build_plan_table(made, actual))
    chosen = [(each.target, line) for each in subjects for line in (*each.describe_chosen(), *each.describe_unknown())]
    for line in (*describe_beside(made), *(f"{target.name}: {line}" for target, line in chosen)):
        print_text(line)


def build_plan_table(made: Plan, actual: tuple[StepActual, ...] = ()) -> TextTable:
    """Build the table of a plan, with what its steps took where they are made."""
    title = f"plan of {', '.join(made.targets)}: {', '.join(made.strategies)}"
    header, rows = build_header(made, actual), tuple(build_rows(made, actual))
    return TextTable(title, header, rows, CAPTION, right=frozenset(header) - {"step", "rate"})


def _compare(subject: PlanSubject, made: Plan) -> tuple[StepActual, ...]:
    """Return what the steps of the saved plan took, for those that this plan has too."""
    saved = load_plan(subject.artifacts.root, subject.target.name)
    known = {each.asset for way in made.ways.values() for each in way.steps}
    compared = () if saved is None else compare_plan(saved, subject)
    return tuple(each for each in compared if each.step.asset in known and each.seconds is not None)
