"""The inputs of drafts, as the assets that exist give them, what a draft leaves out, and the run file of its training."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import FeatureSet, StoreSpec, StreamPlace, TrainRun
from draftworks.config.strategies import StrategySpec
from draftworks.data.rejected import KEPT_REASONS, RejectedSample, read_rejected, write_rejected
from draftworks.errors import ConfigError, StoreError
from draftworks.planning.identities import DraftInputs, read_draft_inputs
from draftworks.preflight.compatibility import check_start_from
from draftworks.preflight.plausible_values import require_passed_fp8_gate
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult
from draftworks.storage.identity import digest
from draftworks.storage.names import of_strategy
from draftworks.storage.records import choose_name, read_names
from draftworks.targets.registry import apply_overrides
from resources.workspace import Workspace
from spec_assets.metadata import format_table


class DraftConfig(dg.Config):
    """Overrides of one run; what the registry says is the default."""

    options: dict[str, Any] = Field(
        default_factory=dict, description="Strategy options that differ from the registry's."
    )
    training: dict[str, Any] = Field(
        default_factory=dict, description="Training settings that differ from the registry's."
    )
    start_from: str = Field(
        default="",
        description="Digest of a draft of this target and strategy to go on from (a tune); default what the registry says.",
    )
    start_over: bool = Field(
        default=False, description="Train from the first step, even if this very draft exists or was interrupted."
    )
    retries: int = Field(
        default=10, ge=0, description="Number of automatic restarts of an interrupted training from its checkpoint."
    )


def resolve_draft_inputs(
    workspace: Workspace, strategy: StrategySpec, target: TargetSpec, config: DraftConfig
) -> DraftInputs:
    """Return the inputs of a draft.

    Raises:
        ConfigError: unknown options.
        StoreError: an asset does not exist yet.
        Fp8GateClosed: the features are to be in fp8, and the comparison that this needs has not passed.
    """
    chosen = apply_overrides(target.name, strategy, target.strategies[strategy.name], config.options, config.training)
    files, tuned = workspace.resolve_target_files(target.name), None
    require_passed_fp8_gate(workspace.artifacts, target, files.digest, [strategy.name])
    if config.start_from:
        tuned = locate_tuned_draft(workspace.artifacts, target.name, strategy.name, config.start_from)
        options = strategy.parse_options(chosen.options, where=f"options of {strategy.name}")
        check_start_from(tuned, strategy, options, files, f"target {target.name}: {strategy.name}: start_from")
    return read_draft_inputs(workspace.results, strategy, target, chosen, tuned)


def locate_tuned_draft(artifacts: ArtifactStore, target: str, strategy: str, draft: str) -> Path:
    """Return the folder of the draft that a tune goes on from.

    Raises:
        ConfigError: the target has no such draft, or it is damaged.
    """
    known = artifacts.list_all(of_strategy(strategy).draft, target)
    try:
        name = choose_name(draft, read_names(known))
    except StoreError as error:
        raise ConfigError(f"start_from: target {target}, {strategy}: {error}") from None
    found = next(each for each in known if each.path.name == name)
    damage = found.find_damage(artifacts.digests.of_file)
    if damage is not None:
        raise ConfigError(f"start_from: draft {draft} is damaged: {damage}. Train a draft from the start")
    return found.path


def build_train_run(
    out: Path,
    strategy: str,
    inputs: DraftInputs,
    store: StoreSpec,
    stream: StreamPlace | None = None,
    plan: Path | None = None,
) -> TrainRun:
    return TrainRun(
        out=out,
        target=inputs.files,
        strategy=strategy,
        options=inputs.options,
        training=inputs.training,
        train=FeatureSet(tokens=inputs.train_tokens.path, features=plan or inputs.train_features.path),
        heldout=inputs.heldout,
        store=store,
        stream=stream,
        vocab_mapping=inputs.locate_vocab_file(),
        start_from=inputs.start_from,
    )


LEFT_OUT = "left_out_samples"
"""Key of the reasons of samples that could not be captured, by sample id, as `draftworks.programs.train` reports it."""


def copy_plan(source: Path, folder: Path) -> Path:
    """Copy a planned set for a stream, unless an earlier attempt has; it stays as it is when the plan is corrected."""
    if not folder.exists():
        staging = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(source, staging)
        staging.rename(folder)
    return folder


def settle_features(
    workspace: Workspace, planned: Artifact, plan: Path | None, streams: Iterable[str], report: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what has changed in a draft's identity if its stream went on without samples; correct the planned set.

    Args:
        plan: the stream's copy of the planned set.
        streams: names of the streams that the draft reads.
    """
    left_out = report.get(LEFT_OUT)
    if not left_out or plan is None:
        return {}
    from draftworks.features.manifest import read_feature_set

    used = read_feature_set(plan).leave_out(left_out)
    _correct_plan(workspace, planned, left_out)
    return {"features": digest({name: used.stream_versions[name] for name in streams})}


def describe_left_out(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata of a streamed training that went on without some samples: how many, and why."""
    left_out = summary.get(LEFT_OUT, {})
    if not left_out:
        return {}
    return {
        "failed_samples": len(left_out),
        LEFT_OUT: format_table(("sample", "reason"), left_out.items(), KEPT_REASONS),
    }


def _correct_plan(workspace: Workspace, planned: Artifact, left_out: Mapping[str, str]) -> None:
    """Publish the planned features again without samples that could not be captured, unless another plan is newer.

    Their content version is then that of a stored set without them, and other drafts need not find them again.
    """
    from draftworks.data.conversations import QUARANTINE_FILE
    from draftworks.features.manifest import read_feature_set, write_feature_set

    current = workspace.artifacts.load_current(planned.asset, planned.target)
    if current.path != planned.path:
        return

    def build(out: Path) -> BuildResult:
        found = read_feature_set(current.path)
        manifest = found.leave_out(left_out)
        write_feature_set(out, manifest.refs, manifest.identity, manifest.streams, manifest.store)
        known = current.path / QUARANTINE_FILE
        before = read_rejected(known) if known.exists() else []
        present = {ref.sample_id for ref in found.refs}
        new = [RejectedSample(*each) for each in left_out.items() if each[0] in present]
        write_rejected(out / QUARANTINE_FILE, [*before, *new])
        figures = {
            "data_version": manifest.data_version,
            "samples": manifest.samples,
            "tokens": manifest.tokens,
            "stream_versions": manifest.stream_versions,
            "bytes": manifest.nbytes,
            "failed_samples": len(before) + len(new),
        }
        return BuildResult(manifest.data_version, {**current.summary, **figures})

    workspace.artifacts.obtain(current.asset, current.target, current.identity, build, start_over=True)
