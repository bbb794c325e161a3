"""The command `draftworks decide`: keep, tune or retrain the draft in service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftworks.errors import DraftworksError
from draftworks.programs.service_commands import (
    CHECKOUT_REGISTRY,
    RegistryOption,
    StrategyArgument,
    TargetArgument,
    open_service,
)
from draftworks.programs.start import report_error


def decide(
    target: TargetArgument,
    strategy: StrategyArgument,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Also write the intervals against both margins as a PNG file.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the decision, and record nothing.")] = False,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Decide from the newest report whether the draft in service is kept, tuned or trained anew; starts nothing."""
    from draftworks.decision.deciding import Decider, describe_decision
    from draftworks.decision.record import save_decision
    from draftworks.storage.atomic import publish_file

    try:
        service = open_service(registry, target, strategy)
        decision = Decider.of(service).decide()
        if not dry_run:
            decision = save_decision(service.artifacts.root, decision)
        typer.echo(describe_decision(decision))
        if picture is not None:
            from draftworks.decision.plots import plot_decision

            with publish_file(picture) as staging:
                staging.write_bytes(plot_decision(decision))
    except DraftworksError as error:
        raise report_error(error) from None
    except OSError as error:
        raise report_error(DraftworksError(f"{picture}: cannot be written: {error}")) from None
