"""`draftworks export-features`: write the training features of a target for other software."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from draftworks.config.strategies import resolve_strategy
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.programs.start import CHECKOUT_REGISTRY, RegistryOption, report_error
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.identity import FileDigests
from draftworks.storage.names import TOKENIZED_TRAIN, TRAINING_FEATURES
from draftworks.storage.records import read_captured_weights
from draftworks.storage.words import format_count, suggest_or_list
from draftworks.targets.feature_stores import locate_feature_store
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target

_SECONDS_BETWEEN_LINES = 10.0


def export_features(
    target: Annotated[str, typer.Argument(help="Name of the target in the registry.")],
    out: Annotated[Path, typer.Argument(help="New folder: the data path of `speculators train`.")],
    strategy: Annotated[
        str | None, typer.Option(help="Whose taps are written; default the only one of the target.")
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="Write 8-bit floats, for `--hidden-states-backend fp8`.")] = False,
    samples: Annotated[int | None, typer.Option(min=1, help="Only the first samples; default all.")] = None,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Write the stored training features of a target in the layout of speculators 0.9.0."""
    try:
        record = write_speculators_features(Registry(registry), target, out, strategy, fp8, samples)
    except DraftworksError as error:
        raise report_error(error) from None
    ids = " ".join(map(str, record["target_layer_ids"]))
    typer.echo(
        f"{out}: {format_count(record['samples'], 'sample')}, {record['tokens']:,} tokens, "
        f"streams {', '.join(record['streams'])}"
    )
    typer.echo(
        f"train with: --data-path {out} --target-layer-ids {ids} --hidden-states-backend {record['transfer']} "
        "--on-missing raise"
    )


def write_speculators_features(
    registry: Registry, target: str, out: Path, strategy: str | None, fp8: bool = False, samples: int | None = None
) -> dict:
    """Write the features of a target's newest training set into the new folder `out`; return what was written.

    Raises:
        ConfigError: the target, or the strategy, is not in the registry.
        StoreError: the features do not exist, or are those of other weights, or are streamed and so not stored.
    """
    spec = registry.load_target(target)
    if strategy is None and len(spec.strategies) != 1:
        raise ConfigError(
            f"target {target} has the strategies {', '.join(sorted(spec.strategies))}: name one by --strategy"
        )
    name = strategy or next(iter(spec.strategies))
    if name not in spec.strategies:
        raise ConfigError(f"target {target} has no strategy {name!r}; {suggest_or_list(name, sorted(spec.strategies))}")
    digests = FileDigests(registry.resolve_var_folder() / "digests.json")
    files = resolve_target(spec, registry, digests)
    artifacts = ArtifactStore(registry.resolve_var_folder(), digests)
    tokens, features = (artifacts.load_current(name, target) for name in (TOKENIZED_TRAIN, TRAINING_FEATURES))
    if read_captured_weights(features) != files.digest:
        raise StoreError(
            f"target {target}: its features were captured from other weights than it has now. Capture them again: "
            f"draftworks run prepare --target {target}"
        )
    if features.summary.get("planned"):
        raise StoreError(
            f"target {target} has `streaming`: its features are captured while a draft is trained on them, and are not "
            "stored. Remove `streaming` and materialize training_features"
        )
    kind = resolve_strategy(name)
    options = kind.parse_options(spec.strategies[name].options, where=f"target {target}: {name}")
    taps = tuple(tap.name for tap in kind.taps(files.num_layers, options))

    from draftworks.data.tokenized import TokenizedSet
    from draftworks.drafts.target_parts import read_final_norm
    from draftworks.export.speculators_features import SpeculatorsFeatures, export_features
    from draftworks.features.manifest import read_feature_set
    from draftworks.features.open_store import open_store

    manifest = read_feature_set(features.path)
    norm = read_final_norm(files, files.hidden_size) if manifest.identity.last_normed else None
    wanted = SpeculatorsFeatures(taps, norm, fp8, samples)
    store = open_store(locate_feature_store(registry, files))
    return export_features(manifest, store, TokenizedSet.open(tokens.path), wanted, out, _make_progress())


def _make_progress() -> Callable[[int, int], None]:
    """Return a callback that says now and then how many samples are written."""
    said = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            typer.echo(f"{done} of {total} samples", err=True)

    return report
