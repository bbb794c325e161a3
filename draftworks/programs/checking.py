"""`draftworks check`: find what would fail in a run, before the run costs anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from draftworks.errors import DraftworksError
from draftworks.preflight.examine import examine_entry
from draftworks.preflight.findings import SEVERITIES, Finding, Findings
from draftworks.preflight.machine import check_writable, find_deployment_warnings
from draftworks.preflight.services import find_refused_jobs, find_storage_problems, list_scheduler_users
from draftworks.programs.start import shorten_paths
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
        checked[name] = tuple(one for one in entry if one.text not in shared)
        if not as_json:
            _print_findings(name, checked[name], registry, len(checked[name]) < len(entry))
    errors = len(shared) + sum(one.severity == "error" for findings in checked.values() for one in findings)
    if as_json:
        typer.echo(json.dumps(_to_json(shared, warnings, checked), indent=2))
    else:
        for one in [*(Finding("error", text) for text in shared), *warnings]:
            typer.echo(f"{one.severity}: {shorten_paths(one.text, registry)}")
        everything = [*warnings, *(one for findings in checked.values() for one in findings)]
        doubts = sum(one.severity == "warning" for one in everything)
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
    errors = sum(one.severity == "error" for one in findings)
    warnings = sum(one.severity == "warning" for one in findings)
    parts = [format_count(count, what) for count, what in ((errors, "problem"), (warnings, "warning")) if count]
    sound = "ok but for the problems below" if has_shared else "ok"
    typer.echo(f"{name}: {', '.join(parts) if errors else ', '.join([sound, *parts])}")
    for one in sorted(findings, key=lambda one: SEVERITIES.index(one.severity)):
        for line in one.text.splitlines():
            typer.echo(f"  {one.severity}: {shorten_paths(line, registry)}")


def _to_json(shared: list[str], warnings: list[Finding], checked: dict[str, tuple[Finding, ...]]) -> dict[str, object]:
    return {
        "problems": shared,
        "warnings": [one.text for one in warnings],
        "targets": {
            name: {
                f"{severity}s": [one.text for one in findings if one.severity == severity] for severity in SEVERITIES
            }
            for name, findings in checked.items()
        },
    }
