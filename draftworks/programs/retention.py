"""The commands usage, prune, pin and unpin."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import typer

from draftworks.errors import DraftworksError
from draftworks.evaluation.report.text_tables import SHORT_DIGEST, TextTable, print_table, print_text
from draftworks.programs.start import CHECKOUT_REGISTRY, RegistryOption, report_error
from draftworks.retention.removable import Item, Place, RemovalPlan, plan_removal
from draftworks.retention.removal import Removal, remove_items
from draftworks.retention.stored_results import list_pins, pin_result, unpin_result
from draftworks.retention.survey import Survey, survey
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.words import list_fitting
from draftworks.targets.registry import Registry

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SHOWN = 20


def usage(as_json: JsonOption = False, registry: RegistryOption = CHECKOUT_REGISTRY) -> None:
    """Show how many bytes each kind of result takes, for each target, and what is pinned."""
    try:
        place = Place.of(Registry(registry))
        found, pins = survey(place), list_pins(place.var)
    except DraftworksError as error:
        raise report_error(error) from None
    if as_json:
        sizes = [
            {
                "kind": each.kind,
                "owner": each.owner,
                "targets": sorted(found.targets_of.get(each.owner, ())),
                "bytes": n,
            }
            for each, n in sorted_sizes(found)
        ]
        typer.echo(json.dumps({"sizes": sizes, "pins": [str(pin.result) for pin in pins]}))
        return
    print_table(build_usage_table(found))
    for pin in pins:
        print_text(f"pinned: {pin.result}, by {pin.who}: {pin.why or 'no reason given'}")


def prune(
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only show what would go.")] = False,
    as_json: JsonOption = False,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Remove what no current, best, pinned or promoted result was made from; shows it only, unless --yes is given."""
    found = Registry(registry)
    try:
        place = Place.of(found)
        looked = survey(place)
        plan = plan_removal(looked.totals, looked.candidates, place.settings.budgets)
        if not as_json:
            print_table(build_kinds_table(plan))
            _print_items(plan.items)
        if not yes:
            if as_json:
                typer.echo(json.dumps({"would_remove": list(map(describe, plan.items)), "bytes": plan.nbytes}))
            elif plan.items:
                print_text(f"{format_bytes(plan.nbytes)} would go. Remove with: draftworks prune --yes")
            return
        done = remove_items(plan, lambda: Place.of(found))
    except DraftworksError as error:
        raise report_error(error) from None
    if as_json:
        removed = list(map(describe, done.removed))
        typer.echo(json.dumps({"removed": removed, "left": done.left, "bytes": done.nbytes}))
    else:
        _print_removal(done)


def pin(
    target: str,
    asset: Annotated[str, typer.Argument(help="Such as eagle3_draft.")],
    digest: Annotated[str | None, typer.Option(help="Of the result, or its begin; default: the newest.")] = None,
    why: Annotated[str, typer.Option(help="Kept with the pin.")] = "",
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Keep a result, and all that it was made from, until it is unpinned."""
    try:
        made = pin_result(ArtifactStore(Registry(registry).resolve_var_folder()), asset, target, digest, why)
    except (DraftworksError, ValueError) as error:
        raise report_error(error) from None
    typer.echo(f"pinned {made.asset} {made.digest} of target {made.target}")


def unpin(target: str, asset: str, digest: str, registry: RegistryOption = CHECKOUT_REGISTRY) -> None:
    """Take a pin away."""
    try:
        unpin_result(Registry(registry).resolve_var_folder(), asset, target, digest)
    except (DraftworksError, ValueError) as error:
        raise report_error(error) from None
    typer.echo(f"{asset} {digest} of target {target} is not pinned any more")


def sorted_sizes(found: Survey) -> list[Any]:
    """Return holdings and their bytes, the largest first, without empty ones."""
    return sorted(((each, n) for each, n in found.sizes.items() if n), key=lambda one: (-one[1], one[0].owner))


def name_owner(owner: str, targets: Collection[str]) -> str:
    """Return whose something is: a target, or, of what targets of the same weights share, these and the weights."""
    if not owner:
        return "all"
    shared = [target for target in sorted(targets) if target != owner]
    return f"{list_fitting(shared, 40)} (weights {owner[:SHORT_DIGEST]})" if shared else owner


def build_usage_table(found: Survey) -> TextTable:
    """Build a table with a row per owner and kind, the largest first."""
    rows = [
        (name_owner(each.owner, found.targets_of.get(each.owner, ())), each.kind, format_bytes(nbytes))
        for each, nbytes in sorted_sizes(found)
    ]
    rows.append(("together", "", format_bytes(sum(found.sizes.values()))))
    return TextTable("usage", ("owner", "kind", "bytes"), tuple(rows), right=frozenset(("bytes",)), heads=2)


def build_kinds_table(plan: RemovalPlan) -> TextTable:
    """Build a table with a row per kind: what there is, what may go, what goes."""
    columns = ("kind", "there is", "nothing refers to", "goes", "then", "budget")
    rows = []
    for each in plan.kinds:
        budget = "" if each.budget is None else format_bytes(each.budget) + (" (over)" if each.is_over else "")
        sizes = (each.total, each.removable, each.removed, each.total - each.removed)
        rows.append((each.kind, *map(format_bytes, sizes), budget))
    return TextTable("prune", columns, tuple(rows), right=frozenset(columns[1:]))


def describe(item: Item) -> dict[str, Any]:
    return {"kind": item.kind, "owner": item.owner, "name": item.name, "bytes": item.nbytes, "why": item.why}


def format_bytes(nbytes: float) -> str:
    """Format bytes in the largest unit that leaves at least 1: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _print_items(items: Sequence[Item]) -> None:
    for item in sorted(items, key=lambda one: -one.nbytes)[:SHOWN]:
        owner = f" of {name_owner(item.owner, item.targets)}" if item.owner else ""
        print_text(f"{format_bytes(item.nbytes):>9}  {item.name}{owner}: {item.why}")
    if len(items) > SHOWN:
        print_text(f"and {len(items) - SHOWN} more: --json lists all")


def _print_removal(done: Removal) -> None:
    print_text(f"removed {len(done.removed)}: {format_bytes(done.nbytes)} are free")
    for name, reason in done.left.items():
        print_text(f"left {name}: {reason}")
