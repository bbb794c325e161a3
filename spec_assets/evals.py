"""Eval set assets. `heldout` is split off a target's own conversations; the others are files in registry/evals/."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.run_files import EVAL_PART, TOKENS_FOLDER, CaptureRun, StoreSpec
from draftworks.errors import DataError
from draftworks.evaluation.eval_cache import CacheEntry, EvalCache
from draftworks.planning.identities import Conversations, EvalSubject, locate_cache_entry
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.files import publish_json, remove
from draftworks.storage.names import RECIPE, TARGET_MODEL, EvalSetAssets, of_eval_set
from draftworks.storage.records import AnswersIdentity, EvalFeaturesIdentity
from draftworks.targets.registry import Registry
from resources.job_claims import CLAIM
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import asset, obtain_result, read_partition, report_check, report_result, require_target
from spec_assets.data import (
    FINISHED,
    FINISHED_MEANS,
    answer_conversations,
    check_answers_finished,
    check_supervised_share,
)
from spec_assets.features import (
    VERIFIED,
    VERIFIED_MEANS,
    describe_features,
    judge_verification,
)
from spec_assets.metadata import describe_lineage, describe_rejections, select_figures
from spec_assets.workers import launch_workers

CAPTURE_REPORT = "capture.json"


def make_eval_set_assets(name: str) -> list[dg.AssetsDefinition]:
    """Return `{eval}_set` and `{eval}_responses` of a named set; `heldout` has these from the target's
    conversations."""
    return [_make_set_asset(name), _make_responses_asset(name)]


def _make_set_asset(name: str) -> dg.AssetsDefinition:
    @asset(
        group="inputs",
        kinds=["parquet"],
        name=of_eval_set(name).conversations,
        description=f"The conversations of the eval set {name}: validated, without repetitions, never trained on.",
        deps=[TARGET_MODEL, RECIPE],
        optional=True,
    )
    def conversations(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
        target = require_target(context, workspace)
        registry = workspace.registry
        spec = registry.load_eval_set(name)
        dataset, files = registry.load_dataset(spec.dataset), workspace.resolve_target_files(target.name)

        def build(out: Path) -> BuildResult:
            from draftworks.data.prepare import prepare_eval_set

            data, root = target.data, registry.root
            summary = prepare_eval_set(
                dataset, spec.max_conversations, data, root, files, out, spec.part, target.asks_both_ways
            )
            return BuildResult(data_version=summary["digest"], summary=summary)

        artifact = obtain_result(context, workspace, build)
        metadata = {**select_figures(artifact), **describe_rejections(artifact), **describe_lineage(artifact)}
        return report_result(context, artifact, metadata)

    return conversations


def _make_responses_asset(name: str) -> dg.AssetsDefinition:
    @asset(
        group="data",
        kinds=["pytorch", "parquet"],
        name=of_eval_set(name).responses,
        description=f"The eval set {name}, answered greedily by the target.",
        deps=[TARGET_MODEL, RECIPE, of_eval_set(name).conversations],
        optional=True,
        program="regenerate",
    )
    def responses(
        context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
    ) -> dg.MaterializeResult:
        target = require_target(context, workspace)
        source = Conversations.load(workspace.results, target, name, EVAL_PART)
        artifact = answer_conversations(context, workspace, launcher, source)
        check = check_supervised_share(artifact, of_eval_set(name).responses, target)
        if not check.passed:
            raise DataError(f"eval set {name}: {check.description}")
        return report_result(context, artifact, {**select_figures(artifact), **describe_rejections(artifact)})

    return responses


def make_eval_answers_check(name: str) -> dg.AssetChecksDefinition:
    """Return the check `answers_finished` of a named eval set, a warning unless the target makes it a gate."""
    asset_name = of_eval_set(name).responses

    @dg.asset_check(asset=asset_name, name=FINISHED, blocking=True, description=FINISHED_MEANS)
    def answers_finished(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> dg.AssetCheckResult:
        target = workspace.registry.load_target(read_partition(context))
        made = workspace.artifacts.load_current(asset_name, target.name)
        return report_check(context, check_answers_finished(made, asset_name, target))

    return answers_finished


def make_eval_features_asset(name: str) -> dg.AssetsDefinition:
    """Make the asset `{eval}_eval_features`: an entry of the evaluation cache, one for each target and tap set."""

    @asset(
        group="features",
        kinds=["pytorch", "safetensors"],
        name=of_eval_set(name).features,
        description=f"Hidden states of the eval set {name}, which every evaluation of every draft reads; kept in the evaluation cache.",
        deps=[TARGET_MODEL, RECIPE, of_eval_set(name).responses],
        optional=True,
        program="capture",
    )
    def features(
        context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
    ) -> dg.MaterializeResult:
        target = require_target(context, workspace)
        subject = EvalSubject.of(workspace.results, target, name)
        cached = CachedFeatures(workspace, subject)

        def build(out: Path) -> BuildResult:
            result = _to_build_result(cached.obtain_entry(context, launcher, out))
            clear(out)  # the cache has what it needs
            return result

        artifact = obtain_result(context, workspace, build, still_good=lambda _: cached.is_cached(subject.inputs))
        return report_result(context, artifact, {**describe_features(artifact), **_describe_cache(workspace, artifact)})

    return features


def make_eval_features_check(name: str) -> dg.AssetChecksDefinition:
    asset_name = of_eval_set(name).features

    @dg.asset_check(
        asset=asset_name,
        name=VERIFIED,
        blocking=True,
        description=VERIFIED_MEANS,
    )
    def features_verified(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> dg.AssetCheckResult:
        result = judge_verification(workspace.artifacts.load_current(asset_name, read_partition(context)))
        return report_check(context, result)

    return features_verified


@dataclass(frozen=True)
class CachedFeatures:
    """The features of an eval set in the cache and in the store, or their capture."""

    workspace: Workspace
    subject: EvalSubject

    @property
    def store(self) -> StoreSpec:
        return self.workspace.locate_feature_store(self.subject.files)

    def is_cached(self, inputs: Mapping[str, str] | None = None) -> bool:
        """Whether the cache has an entry (of these inputs, if given) whose features are all in the store."""
        from draftworks.features.open_store import holds_feature_set

        known = EvalCache.for_config(self.subject.config).try_get(self.subject.config, inputs)
        return known is not None and holds_feature_set(self.store, known)

    def obtain_entry(self, context: dg.AssetExecutionContext, launcher: TorchLauncher, out: Path) -> CacheEntry:
        """Return the cache entry; capture features that are not in the store if there is none.

        Args:
            out: the folder in which the capture describes its features. It has the same name in each run, unlike the
                cache's own folder of an unfinished entry, so that the job of a run that was killed is found again.
        """
        subject, store = self.subject, self.store
        config = subject.config
        cache = EvalCache.for_config(config)
        if not self.is_cached() and cache.invalidate(config):
            context.log.warning("some cached features are missing in the store: capturing them again")

        def produce(entry: Path) -> None:
            capture = subject.capture
            if not (out / CLAIM).exists():
                clear(out)  # of an attempt that left no job
            run = CaptureRun(
                out=out,
                target=subject.files,
                tokens=subject.responses.path / TOKENS_FOLDER,
                taps=list(subject.taps),
                capture=capture,
                store=store,
                sglang=self.workspace.sglang,
                vllm=self.workspace.vllm,
            )
            python = self.workspace.find_python(capture)
            job = launch_workers(
                context, launcher, self.workspace, "capture", run, capture.processes, capture.device, python
            )
            for file in out.iterdir():
                if file.is_file() and file.name != CLAIM and not file.name.startswith("."):
                    shutil.copy(file, entry)
            publish_json(entry / CAPTURE_REPORT, job.report)

        entry = cache.get_or_produce(config, produce, subject.inputs)
        if entry.rebuilt_because:
            context.log.warning(f"the cached features were made again: {entry.rebuilt_because}")
        return entry


def clear(folder: Path) -> None:
    for each in folder.iterdir():
        remove(each)


def read_answers_identity(workspace: Workspace, target: str, name: str) -> AnswersIdentity:
    """Return what the answers of an eval set were made from.

    Raises:
        StoreError: not materialized yet.
    """
    return AnswersIdentity.of(workspace.artifacts.load_current(of_eval_set(name).responses, target))


def _to_build_result(entry: CacheEntry) -> BuildResult:
    report = json.loads((entry.path / CAPTURE_REPORT).read_text())
    found = {
        "eval_cache": "hit" if entry.hit else "produced",
        "rebuilt_because": entry.rebuilt_because,
    }
    return BuildResult(data_version=entry.data_version, summary={**report, **found})


def _describe_cache(workspace: Workspace, artifact: Artifact) -> dict[str, Any]:
    reason = artifact.summary["rebuilt_because"]
    return {
        "eval_cache": "hit" if artifact.hit else artifact.summary["eval_cache"],
        "eval_cache_key": EvalFeaturesIdentity.of(artifact).eval_cache_key,
        "eval_cache_path": dg.MetadataValue.path(
            locate_cache_entry(workspace.results, artifact).relative_to(workspace.var.parent)
        ),
        **({"rebuilt_because": reason} if reason and not artifact.hit else {}),
    }


EvalUsers = Mapping[str, Sequence[str]]
"""Targets by the named eval set that they list."""


def find_eval_users(registry: Registry, evals: Sequence[str]) -> EvalUsers:
    """Return the targets whose entry mentions an eval set, by the set. Entries are not parsed; a mention too many does no
    harm."""
    patterns = {name: re.compile(rb"(?<![\w.-])" + re.escape(name.encode()) + rb"(?![\w.-])") for name in evals}
    targets = registry.list_targets()
    return {
        name: [target for target in targets if registry.find_in_target_file(target, pattern)]
        for name, pattern in patterns.items()
    }


def depend_on_eval_sets(evals: EvalUsers, select: Callable[[EvalSetAssets], Sequence[str]]) -> Iterator[dg.AssetDep]:
    """Yield dependencies on assets of each eval set, only for the targets that are measured on it."""
    for name, targets in evals.items():
        mapping = dg.StaticPartitionMapping({target: target for target in targets})
        yield from (dg.AssetDep(asset, partition_mapping=mapping) for asset in select(of_eval_set(name)))
