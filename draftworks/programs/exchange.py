"""`draftworks exchange`: have a running vLLM load the draft in service, without a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftworks.errors import DraftworksError
from draftworks.programs.service_commands import (
    CHECKOUT_REGISTRY,
    RegistryOption,
    StrategyArgument,
    TargetArgument,
    require_strategy,
)
from draftworks.programs.start import report_error
from draftworks.service.register import ServiceRegister, locate_format
from draftworks.targets.registry import Registry


def exchange(
    target: TargetArgument,
    strategy: StrategyArgument,
    url: Annotated[str, typer.Argument(help="Address of vLLM on this machine, such as http://127.0.0.1:8000.")],
    folder: Annotated[Path, typer.Option("--folder", help="The draft's folder that vLLM was started with; replaced.")],
    export_format: Annotated[
        str | None, typer.Option("--format", help="Export format, where there are several: the one that is served.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds for each call; requests that run are answered first.")
    ] = 600.0,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Have a running vLLM load the draft in service, without a restart; prints what a service hook confirms with."""
    from draftworks.config.urls import parse_url
    from draftworks.vllm.exchange import exchange_draft

    try:
        found = Registry(registry)
        require_strategy(found, target, strategy)
        register = ServiceRegister(found.resolve_var_folder(), target, strategy)
        draft = register.require().draft
        new = locate_format(register.var, draft, export_format)
        exchange_draft(parse_url(url), new, folder, draft.digest, timeout_s)
        typer.echo(json.dumps({"confirmed": draft.digest}))
    except (DraftworksError, ValueError) as error:
        raise report_error(
            error if isinstance(error, DraftworksError) else DraftworksError(f"{url}: {error}")
        ) from None
