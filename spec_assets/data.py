"""Data assets: from conversations to supervised tokens and the vocabulary mapping. Only the target's answers need a
launched program; everything else is done in the step."""

from pathlib import Path
from typing import Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TOKENS_FOLDER, RegenerateRun
from draftworks.data.growing_files import write_head
from draftworks.errors import ConfigError
from draftworks.planning.identities import (
    TRAIN,
    Conversations,
)
from draftworks.preflight.plausible_values import describe_coverage, is_low
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.names import (
    CONVERSATIONS,
    DATASET,
    HELDOUT,
    HELDOUT_RESPONSES,
    RECIPE,
    RESPONSES,
    TARGET_MODEL,
    TOKENIZED_TRAIN,
)
from draftworks.targets.training_data import (
    load_slice_plan,
    load_training_datasets,
    resolve_draft_vocab_size,
)
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import asset, obtain_result, report_result, require_target, to_severity
from spec_assets.metadata import describe_lineage, describe_rejections, describe_slices, select_figures
from spec_assets.workers import launch_workers

GROUP = "data"
SUPERVISED = "supervised_share"
FINISHED = "answers_finished"
FINISHED_MEANS = "Most answers end by themselves, before a limit cuts them off."
MOST_UNFINISHED = 0.5
"""Share of cut answers above which the check fails."""


@asset(group=GROUP, kinds=["parquet"], deps=[TARGET_MODEL, DATASET, RECIPE])
def conversations(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """The data set's conversations: validated, without repetitions, split into a training and a held-out part by
    hash of their prompts."""
    registry = workspace.registry
    target = registry.load_target(context.partition_key)
    files = workspace.resolve_target_files(target.name)

    def build(out: Path) -> BuildResult:
        if target.mix is not None:
            from draftworks.data.prepare import SliceShares, prepare_mix

            sources, plan = load_training_datasets(target, registry), load_slice_plan(target, registry)
            shares = SliceShares.of(target.mix.shares)
            return _to_build_result(prepare_mix(sources, plan, target.data, registry.root, files, out, shares))
        from draftworks.data.prepare import prepare_conversations

        source = registry.load_dataset(target.dataset)
        if target.streaming is not None and target.streaming.vocabulary_samples is not None:
            source = write_head(source, registry.root, target.streaming.vocabulary_samples, out)
        return _to_build_result(prepare_conversations(source, target.data, registry.root, files, out))

    artifact = obtain_result(context, workspace, build)
    metadata = {
        "dagster/row_count": artifact.summary["conversations"],
        **select_figures(artifact),
        **describe_rejections(artifact),
        **describe_lineage(artifact),
        **describe_slices(artifact, "shares"),
    }
    return report_result(context, artifact, metadata)


@asset(
    group=GROUP,
    kinds=["pytorch", "parquet"],
    deps=[TARGET_MODEL, RECIPE, CONVERSATIONS],
    check_specs=[dg.AssetCheckSpec(FINISHED, asset=RESPONSES, blocking=True, description=FINISHED_MEANS)],
    program="regenerate",
)
def responses(
    context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
) -> dg.MaterializeResult:
    """Training conversations as the target itself would answer them, token by token; or as they are, where so
    configured."""
    spec = workspace.registry.load_target(context.partition_key)
    artifact = answer_conversations(
        context, workspace, launcher, Conversations.load(workspace.results, spec, HELDOUT, TRAIN)
    )
    check = check_answers_finished(artifact, RESPONSES, spec)
    metadata = {"mode": spec.responses.mode, **select_figures(artifact), **describe_rejections(artifact)}
    return report_result(context, artifact, metadata, [check])


@asset(
    group=GROUP,
    kinds=["pytorch", "parquet"],
    deps=[TARGET_MODEL, RECIPE, CONVERSATIONS],
    check_specs=[
        dg.AssetCheckSpec(
            SUPERVISED, asset=HELDOUT_RESPONSES, blocking=True, description="Enough tokens to measure on."
        ),
        dg.AssetCheckSpec(FINISHED, asset=HELDOUT_RESPONSES, blocking=True, description=FINISHED_MEANS),
    ],
    program="regenerate",
)
def heldout_responses(
    context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
) -> dg.MaterializeResult:
    """The held-out conversations, answered greedily by the target: what every draft is measured on."""
    spec = workspace.registry.load_target(context.partition_key)
    source = Conversations.load(workspace.results, spec, HELDOUT, HELDOUT)
    artifact = answer_conversations(context, workspace, launcher, source)
    checks = [judge(artifact, HELDOUT_RESPONSES, spec) for judge in (check_supervised_share, check_answers_finished)]
    return report_result(context, artifact, {**select_figures(artifact), **describe_rejections(artifact)}, checks)


@asset(
    group=GROUP,
    kinds=["parquet"],
    deps=[RECIPE, RESPONSES],
    check_specs=[
        dg.AssetCheckSpec(SUPERVISED, asset=TOKENIZED_TRAIN, blocking=True, description="Enough tokens to learn from.")
    ],
)
def tokenized_train(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Token ids and loss mask of every training sample."""
    spec = workspace.registry.load_target(context.partition_key)
    source = workspace.artifacts.load_current(RESPONSES, spec.name)

    def build(out: Path) -> BuildResult:
        from draftworks.data.prepare import keep_supervised_rows

        count_by = None if spec.mix is None else next(iter(spec.mix.shares), None)
        return _to_build_result(keep_supervised_rows(source.path / TOKENS_FOLDER, out, count_by))

    artifact = obtain_result(context, workspace, build)
    metadata = {
        "dagster/row_count": artifact.summary["samples"],
        **select_figures(artifact),
        **describe_slices(artifact, "slices"),
    }
    return report_result(context, artifact, metadata, [check_supervised_share(artifact, TOKENIZED_TRAIN, spec)])


@asset(
    group=GROUP, kinds=["safetensors"], deps=[TARGET_MODEL, RECIPE, TOKENIZED_TRAIN, HELDOUT_RESPONSES], optional=True
)
def vocab_mapping(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """The tokens a draft can say: the most frequent supervised ones, and the way back to the target's ids. It says what share
    of the held-out labels they are: no draft is right more often."""
    spec = require_target(context, workspace)
    size = resolve_draft_vocab_size(spec)
    assert size is not None
    tokens = workspace.artifacts.load_current(TOKENIZED_TRAIN, spec.name)
    heldout = workspace.artifacts.load_current(HELDOUT_RESPONSES, spec.name)
    files = workspace.resolve_target_files(spec.name)

    def build(out: Path) -> BuildResult:
        from draftworks.data.prepare import map_vocabulary

        return _to_build_result(map_vocabulary(tokens.path, files, size, out, heldout.path / TOKENS_FOLDER))

    artifact = obtain_result(context, workspace, build)
    (context.log.warning if is_low(artifact) else context.log.info)(describe_coverage(artifact))
    return report_result(context, artifact, select_figures(artifact))


def answer_conversations(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    launcher: TorchLauncher,
    source: Conversations,
) -> Artifact:
    """Return conversations with answers, tokenized. Answers are the target's, or those of the data set in mode
    passthrough."""
    spec = workspace.registry.load_target(context.partition_key)
    files, responses = workspace.resolve_target_files(spec.name), source.choose_settings(spec)
    generated, remote = responses.mode == "regenerate", responses.endpoint is not None
    if generated and source.kind == "tokens":
        raise ConfigError(
            f"target {spec.name}: data set {source.name} is tokenized already, so its answers cannot be regenerated. "
            f"Set responses.mode to passthrough"
        )

    def regenerate(out: Path) -> BuildResult:
        run = RegenerateRun(
            out=out,
            target=files,
            conversations=source.folder,
            workers=workspace.resolve_launcher(spec.name, "regenerate").workers,
            answers=workspace.locate_answers(files),
            responses=responses,
            only_last_turn=spec.data.only_last_turn,
            max_rejected_share=spec.data.max_rejected_share,
            max_length=spec.max_length,
            capture=spec.capture,
            sglang=workspace.sglang,
            vllm=workspace.vllm,
        )
        device, python = ("cpu", None) if remote else (spec.capture.device, workspace.find_python(spec.capture))
        return _to_build_result(
            launch_workers(context, launcher, workspace, "regenerate", run, 1, device, python).report
        )

    def pass_through(out: Path) -> BuildResult:
        from draftworks.data.prepare import tokenize_part

        log, thinking = context.log.info, responses.thinking
        return _to_build_result(
            tokenize_part(source.folder, source.kind, files, spec.data, spec.max_length, out, log, thinking=thinking)
        )

    return obtain_result(context, workspace, regenerate if generated else pass_through)


def check_supervised_share(artifact: Artifact, asset_name: str, target: TargetSpec) -> dg.AssetCheckResult:
    share, smallest = artifact.summary["supervised_share"], target.data.min_supervised_share
    return dg.AssetCheckResult(
        check_name=SUPERVISED,
        asset_key=asset_name,
        passed=bool(share >= smallest),
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"{share:.1%} of tokens are supervised, at least {smallest:.1%} expected",
        metadata={"supervised_share": share, "min_supervised_share": smallest},
    )


def check_answers_finished(artifact: Artifact, asset_name: str, target: TargetSpec) -> dg.AssetCheckResult:
    """Check that most answers ended by themselves: a draft that learns from cut answers never sees how the target
    ends one."""
    answers, cut = artifact.summary["samples"], artifact.summary.get("unfinished_answers", 0)
    share = cut / answers if answers else 0.0
    limits = f"responses.max_new_tokens ({target.responses.max_new_tokens}) or max_length ({target.max_length})"
    return dg.AssetCheckResult(
        check_name=FINISHED,
        asset_key=asset_name,
        passed=share <= MOST_UNFINISHED,
        severity=to_severity(target.gates.answers_finished),
        description=f"{cut:,} of {answers:,} answers were cut off by {limits}"
        + ("" if share <= MOST_UNFINISHED else ": raise it, or take data with shorter answers"),
        metadata={"unfinished_share": round(share, 4)},
    )


def _to_build_result(summary: dict[str, Any]) -> BuildResult:
    return BuildResult(data_version=summary["digest"], summary=summary)
