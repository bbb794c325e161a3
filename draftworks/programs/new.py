"""The command `draftworks new`: the entry of a target, from a few answers or flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftworks.errors import ConfigError, DraftworksError
from draftworks.programs.start import CHECKOUT_REGISTRY, report_error
from draftworks.storage.words import suggest_or_list

if TYPE_CHECKING:
    from draftworks.planning.new_target import NewTarget
    from draftworks.targets.registry import Registry

FEWEST_CONVERSATIONS = 100


def new(
    name: Annotated[str, typer.Argument(help="Name of the target here: registry/targets/NAME.yaml.")],
    model: Annotated[str | None, typer.Option(help="A folder, a GGUF file, or a hub id such as Qwen/Qwen3-8B.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="File or glob of conversations or prompts; may be given several times.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Instead of --data: an entry of registry/datasets/.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="Kind of draft; may be given several times.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of a job; 0 is the processor. Default: those here.")
    ] = None,
    serve: Annotated[list[str] | None, typer.Option(help="Also measure it in a live server: sglang, vllm.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.01, help="GPU-hours, or hours of a processor, to plan for.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Commit of a hub id; default: the newest that is here.")] = None,
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = CHECKOUT_REGISTRY,
) -> None:
    """Write the entry of a new target, with defaults that fit its model and data; then check it and show its plan.

    What is not given is asked for at a terminal. Nothing that exists is replaced.
    """
    from draftworks.programs.checking import check, plan
    from draftworks.targets.registry import Registry

    written: Path | None = None
    try:
        found = Registry(registry)
        require_free(found, name)
        if dataset is not None and data:
            raise ConfigError("--data and --dataset: give one of them")
        model = model or _ask("model (folder, GGUF file or hub id)", "--model")
        if dataset is None and not data:
            data = [_ask("data (file or glob of conversations or prompts)", "--data, or --dataset")]
        if dataset is None:
            written = _write_dataset(found, name, data or [])
            dataset = name
        path = write_entry(found, name, _describe(found, name, model, revision, dataset, strategy, gpus, serve), hours)
    except (DraftworksError, OSError) as error:
        if written is not None:
            written.unlink()
        raise report_error(error) from None
    typer.echo(f"# {path}\n{path.read_text()}")
    check(registry, [name])
    plan([name], registry=registry)
    typer.echo(f"next: draftworks run everything --target {name}")


def require_free(registry: Registry, name: str) -> None:
    """Raise ConfigError unless a target may be called this, and none is."""
    from draftworks.storage.names import require_name

    try:
        require_name(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    path = registry.root / "targets" / f"{name}.yaml"
    if path.exists():
        raise ConfigError(f"{path} exists: choose another name, or edit it; draftworks check --target {name}")


def write_entry(registry: Registry, name: str, about: NewTarget, hours: float | None = None) -> Path:
    """Write the entry of a target and return its path.

    Args:
        hours: GPU-hours that its plan should fit in: conversations are left out until it does.

    Raises:
        ConfigError: the entry cannot be read back, or would need more hours with the fewest conversations.
    """
    from draftworks.planning.new_target import render_entry
    from draftworks.storage.files import publish_file

    path = registry.root / "targets" / f"{name}.yaml"

    def write(found: NewTarget) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with publish_file(path) as staging:
            staging.write_text(render_entry(found), encoding="utf-8")

    write(about)
    try:
        registry.load_target(name)
        while hours is not None and (fewer := _fit_into(registry, name, about, hours)) is not about:
            about = fewer
            write(about)
    except DraftworksError:
        path.unlink()
        raise
    return path


def _fit_into(registry: Registry, name: str, about: NewTarget, hours: float) -> NewTarget:
    """Return the target with fewer conversations, or itself if its plan fits. Costs are not in proportion: ask again."""
    from draftworks.planning.plan import make_plan
    from draftworks.planning.subject import PlanSubject

    planned = make_plan(PlanSubject.of(name, registry)).chosen.gpu_hours.value
    if planned <= hours:
        return about
    if about.rows is None:
        raise ConfigError(f"{name}: its conversations cannot be counted, so --hours cannot choose among them")
    rows = min(about.rows, about.max_conversations or about.rows)
    kept = min(int(rows * hours / planned), int(rows) - 1)
    if kept < FEWEST_CONVERSATIONS:
        raise ConfigError(
            f"{name}: {rows:,.0f} conversations take {planned:,.1f} hours, so {hours:g} hours are enough for {kept:,}; fewer than {FEWEST_CONVERSATIONS} make no draft. Give more --hours"
        )
    return replace(about, max_conversations=kept)


def _describe(
    registry: Registry,
    name: str,
    model: str,
    revision: str | None,
    dataset: str,
    strategies: Sequence[str] | None,
    gpus: int | None,
    serve: Sequence[str] | None,
) -> NewTarget:
    from draftworks.config.registry_files import TargetSpec
    from draftworks.config.strategies import list_strategies
    from draftworks.planning.data_sample import sample_data
    from draftworks.planning.new_target import NewTarget
    from draftworks.targets.fitted_defaults import read_machine
    from draftworks.targets.resolve import read_shape

    for word in strategies or ():
        if word not in list_strategies():
            raise ConfigError(f"--strategy {word}: no such strategy; {suggest_or_list(word, list_strategies())}")
    place, commit = _locate(registry, model, revision)
    spec = TargetSpec(name=name, model=place, revision=commit, dataset=dataset)
    machine = read_machine()
    sample = sample_data(registry.load_dataset(dataset), registry.root)
    return NewTarget(
        place,
        commit,
        dataset,
        tuple(strategies or ("eagle3",)),
        read_shape(spec, registry),
        (machine.gpus if machine.uses_gpu else 0) if gpus is None else gpus,
        None if sample is None else sample.rows.value,
        serve=tuple(serve or ()),
    )


def _locate(registry: Registry, model: str, revision: str | None) -> tuple[str, str | None]:
    """Return a model as an entry names it, and the commit of one on the hub."""
    from draftworks.storage.hub import find_revision

    path = Path(model).expanduser()
    below = registry.root / path
    if path.exists() or below.exists():
        real = (path if path.exists() else below).resolve()
        root = registry.root.resolve()
        return (os.path.relpath(real, root) if real.is_relative_to(root) else str(real)), None
    if model.count("/") != 1 or model.startswith((".", "/")):
        raise ConfigError(
            f"--model {model}: no such folder or file, here or in {registry.root}, and no hub id (OWNER/NAME)"
        )
    return model, revision or find_revision("--model", model)


def _write_dataset(registry: Registry, name: str, files: Sequence[str]) -> Path:
    from draftworks.planning.new_target import render_dataset
    from draftworks.storage.files import publish_file

    path = registry.root / "datasets" / f"{name}.yaml"
    if path.exists():
        raise ConfigError(f"{path} exists: use it by --dataset {name}, or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    with publish_file(path) as staging:
        staging.write_text(
            render_dataset([each if "://" in each else str(Path(each).expanduser().absolute()) for each in files])
        )
    return path


def _ask(what: str, flag: str) -> str:
    """Return what a person types. Raises ConfigError where nobody can."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}: give it by {flag}")
    return str(typer.prompt(what)).strip()
