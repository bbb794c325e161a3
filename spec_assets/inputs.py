"""Input assets: the target's files and its data set. They are cheap and part of every job. Data versions are content
digests, so that Dagster marks assets as stale that were made from other content."""

import os
from typing import Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.urls import is_url
from draftworks.errors import ConfigError
from draftworks.preflight.compatibility import check_quantizer, check_requirements
from draftworks.preflight.examine import examine_before_run
from draftworks.preflight.findings import Findings
from draftworks.preflight.machine import check_machine, check_placement
from draftworks.preflight.plausible_values import check_decision, check_made_dtypes, require_passed_fp8_gate
from draftworks.preflight.services import check_served_data
from draftworks.sglang.layers import list_sglang_remarks
from draftworks.storage.identity import digest
from draftworks.storage.names import FP8_GATE, TRAINING_FEATURES, of_strategy
from draftworks.targets.fitted_defaults import describe_fitted
from draftworks.targets.gguf_store import ensure_converted, names_gguf
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import (
    digest_datasets,
    find_training_files,
    load_slice_plan,
    load_training_datasets,
)
from draftworks.targets.weights import check_target_weights
from resources.dead_runs import release_dead_runs
from resources.job_claims import is_taken_over
from resources.workspace import Workspace
from spec_assets.common import asset, list_selected_assets
from spec_assets.metadata import format_table

GROUP = "inputs"


@asset(group=GROUP, kinds=["huggingface"])
def target_model(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """The large language model that is to have a draft: its weights, tokenizer and chat template."""
    # Here, because every job begins with the inputs. A job that this run goes on to wait for leaves it its slot.
    mine = list_selected_assets(context)
    dead = release_dead_runs(context.instance, takes=lambda claim: is_taken_over(claim, context.partition_key, mine))
    for run_id in dead.released:
        context.log.warning(f"run {run_id} was killed: it is marked as failed, and its pool slots are free")
    for run_id in set(dead.unknown) - {context.run.run_id}:
        context.log.info(
            f"run {run_id} holds a pool slot, and this machine or container cannot see whether its process is alive."
            " If it is dead, end it in the UI, or start a run on its own machine"
        )
    for run_id in dead.kept:
        context.log.warning(
            f"run {run_id} was killed, and its job lives on in the scheduler: its pool slots stay taken. Run its job again:"
            " it waits for that one"
        )
    target = workspace.registry.load_target(context.partition_key)
    for line in describe_fitted(workspace.registry.read_target(target.name), target):
        context.log.info(f"target {target.name}: {line}")
    ensure_converted(target, workspace.registry, workspace.digests, context.log.info)
    files = workspace.resolve_target_files(target.name)
    weights = check_target_weights(files, target.capture.backend, workspace.weight_checks)
    if weights.note is not None:
        context.log.warning(f"target {target.name}: {weights.note}")
    check_requirements(target, files, workspace.registry)
    trained = list_trained_strategies(target, mine)
    if trained:  # which asks for the gate too, but after the answers
        require_passed_fp8_gate(workspace.artifacts, target, files.digest, trained)
    require_sound_target(context, workspace, target, files)
    for remark in list_sglang_remarks(target, files):
        context.log.warning(remark)
    return dg.MaterializeResult(
        data_version=dg.DataVersion(digest([files.digest, files.tokenizer_digest])),
        metadata={
            "model": files.model,
            **({"dequantised_from": target.model} if names_gguf(target) else {}),
            "revision": files.revision or "(directory)",
            "weights_digest": files.digest,
            "tensors": weights.tensors,
            "weights_checked": weights.note or f"every name and shape, as {weights.model_class}",
            "tokenizer_digest": files.tokenizer_digest,
            "layers": files.num_layers,
            "hidden_size": files.hidden_size,
            "vocabulary": files.vocab_size,
            "context": files.context,
        },
    )


@asset(group=GROUP, kinds=["parquet"])
def dataset(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """The conversations the target's draft learns from, as the files the registry names."""
    registry = workspace.registry
    target = registry.load_target(context.partition_key)
    spec = registry.load_dataset(target.dataset)
    files = find_training_files(target, registry)
    urls = [each for one in load_training_datasets(target, registry) for each in one.files if is_url(each)]
    return dg.MaterializeResult(
        data_version=dg.DataVersion(workspace.read_training_data_version(target)),
        metadata={
            "dataset": spec.name,
            "description": spec.description,
            "licence": spec.licence or "(not given)",
            "files": dg.MetadataValue.json([os.path.relpath(path, registry.root) for path in files]),
            "bytes": sum(path.stat().st_size for path in files),
            **describe_mix(target, registry),
            **({"downloaded_from": dg.MetadataValue.json(urls)} if urls else {}),
        },
    )


def describe_mix(target: TargetSpec, registry: Registry) -> dict[str, Any]:
    """Return metadata of a mix: its data sets, weights and shares of slices; {} without a mix."""
    if target.mix is None:
        return {}
    plan = load_slice_plan(target, registry)
    found: dict[str, Any] = {"mixed_with": dg.MetadataValue.json(target.mix.datasets)}
    if plan is not None:
        rows = [(one.column, one.value, f"{one.weight:g}") for one in plan.weights]
        found["weights"] = format_table(("slice by", "value", "weight"), rows)
    if target.mix.shares:
        found["shares"] = dg.MetadataValue.json(target.mix.shares)
    return found


def read_data_versions(workspace: Workspace, target: TargetSpec) -> dict[str, str]:
    """Return the content digest of every data set of a target and of its eval sets, by name."""
    return digest_datasets(target, workspace.registry, workspace.digests)


def list_trained_strategies(target: TargetSpec, selected: set[str]) -> list[str]:
    """Return the strategies for which a run will ask the fp8 gate; none where the run makes the gate itself."""
    if FP8_GATE in selected:
        return []
    return [name for name in target.strategies if {TRAINING_FEATURES, of_strategy(name).draft} & selected]


def require_sound_target(
    context: dg.AssetExecutionContext, workspace: Workspace, target: TargetSpec, files: TargetFiles
) -> None:
    """Raise ConfigError for what would fail later: implausible values, drafts that cannot be built or served, data
    without a usable row. Warnings go to the log."""
    registry, data = workspace.registry, read_data_versions(workspace, target)
    of_machine = Findings()  # another may be the one that captures, and this run may need none of it
    check_machine(target, registry, of_machine)
    check_made_dtypes(target, registry, workspace.artifacts, of_machine)
    check_quantizer(target, files, registry, of_machine)
    of_entry = Findings()  # and of what it names, whatever the machine
    check_placement(target, registry, of_entry)
    check_decision(target, registry, of_entry)
    check_served_data(target, registry, of_entry)
    findings = (*of_entry.found, *examine_before_run(target, files, registry, data, workspace.target_checks))
    for finding in (*of_machine.found, *(found for found in findings if found.severity == "warning")):
        context.log.warning(finding.text)
    errors = [finding.text for finding in findings if finding.severity == "error"]
    if errors:
        raise ConfigError("\n".join(errors))
