"""`draftworks import`: a checkpoint of other software as a draft of a target."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import yaml

from draftworks.config.strategies import resolve_strategy
from draftworks.errors import DraftworksError
from draftworks.programs.start import CHECKOUT_REGISTRY, RegistryOption, report_error
from draftworks.storage.identity import FileDigests
from draftworks.targets.gguf_store import ensure_converted
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target


def import_checkpoint(
    source: Annotated[Path, typer.Argument(help="Folder of a draft: ours, speculators, SGLang/SpecForge or z-lab.")],
    out: Annotated[Path, typer.Argument(help="New folder for the draft, best below the registry.")],
    target: Annotated[str, typer.Option(help="The registry's name of the model it drafts for.")],
    norm_output_means: Annotated[
        str | None,
        typer.Option(help="specforge or sglang: by whom `norm_output` of an EAGLE-3 draft is to be understood."),
    ] = None,
    layer_ids_mean: Annotated[
        str | None,
        typer.Option(
            help="sglang or vllm: by whom an EAGLE-3 draft's `eagle_aux_hidden_state_layer_ids` are to be understood."
        ),
    ] = None,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Import a checkpoint of other software as a draft, to measure or train it; prints the registry entry for it."""
    from draftworks.export.importing import import_draft

    try:
        found = Registry(registry)
        digests = FileDigests(found.resolve_var_folder() / "digests.json")
        spec = found.load_target(target)
        ensure_converted(spec, found, digests, partial(typer.echo, err=True))
        imported = import_draft(source, resolve_target(spec, found, digests), out, norm_output_means, layer_ids_mean)
    except DraftworksError as error:
        raise report_error(error) from None
    defaults = resolve_strategy(imported.strategy).options().model_dump()
    options = {name: value for name, value in imported.options.items() if value != defaults[name]}
    where = os.path.relpath(out.resolve(), found.root.resolve())
    entry = {"strategies": {imported.strategy: {"start_from": where, "options": options, "training": {"max_steps": 0}}}}
    for remark in imported.remarks:
        typer.echo(f"note: {remark}", err=True)
    typer.echo(f"# a draft of the format {imported.format}, measured as it is. For registry/targets/{target}.yaml:")
    typer.echo(yaml.safe_dump(entry, sort_keys=False, default_flow_style=None), nl=False)
