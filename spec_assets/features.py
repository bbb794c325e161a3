"""Features: the target's hidden states at every tap that any of its strategies needs, in one content-addressed store."""

from pathlib import Path

import dagster as dg

from draftworks.artifacts import Artifact, Built
from draftworks.demands import union_of_taps
from draftworks.runs import TOKENS_FOLDER, CaptureRun
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import asset, launch, obtained, shown
from spec_assets.metadata import human_bytes

GROUP = "features"
GPU_POOL = "gpu"
VERIFIED = "features_verified"
VERIFICATIONS = ("rows_equal_tokens", "finite", "features_as_captured", "head_equals_logits")


def captured(
    context: dg.AssetExecutionContext,
    workspace: Workspace,
    launcher: TorchLauncher,
    asset_name: str,
    tokens_asset: str,
    tokens_folder: str = "",
) -> dg.MaterializeResult:
    """Capture what is missing of one tokenized set and publish the manifest of references."""
    target = context.partition_key
    spec = workspace.registry.target(target)
    files = workspace.target_files(target)
    tokens = workspace.artifacts.current(tokens_asset, target)
    taps = union_of_taps(spec, files.num_layers)
    store = workspace.feature_store(target)

    def build(out: Path) -> Built:
        run = CaptureRun(
            out=out, target=files, tokens=tokens.path / tokens_folder, taps=taps, capture=spec.capture, store=store
        )
        job = launch(context, launcher, workspace, "capture", run, spec.capture.processes, spec.capture.device)
        return Built(data_version=job.report["data_version"], summary=job.report)

    identity = {
        "tokens": tokens.data_version,
        "target": files.digest,
        "taps": taps,
        "capture": spec.capture.identity(),
    }

    def still_stored(artifact: Artifact) -> bool:
        from draftworks.features.presence import holds_feature_set

        return holds_feature_set(store, artifact.path)

    artifact = obtained(context, workspace, identity, build, still_good=still_stored)
    return shown(context, artifact, features_metadata(artifact), [verified(artifact, asset_name)])


def features_metadata(artifact: Artifact) -> dict:
    summary = artifact.summary
    return {
        "dagster/row_count": summary["samples"],
        "tokens": summary["tokens"],
        "captured_samples": summary["captured_samples"],
        "captured_bytes": human_bytes(summary["captured_bytes"]),
        "bytes": human_bytes(summary["bytes"]),
        "bytes_per_token": summary["bytes_per_token"],
        "tokens_per_second": summary["tokens_per_second"],
        "streams": ", ".join(summary["streams"]),
    }


def verified(artifact: Artifact, asset_name: str) -> dg.AssetCheckResult:
    """What a few samples, read back from the store and captured again, showed."""
    verification = artifact.summary["verification"]
    return dg.AssetCheckResult(
        check_name=VERIFIED,
        asset_key=asset_name,
        passed=all(verification[name] for name in VERIFICATIONS),
        severity=dg.AssetCheckSeverity.ERROR,
        metadata=verification,
    )


def _check(asset_name: str) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        VERIFIED,
        asset=asset_name,
        blocking=True,
        description="Samples read back: finite, a row per token, equal to a new capture, and the target's own head on "
        "`last` gives the engine's logits.",
    )


@asset(
    group=GROUP,
    kinds=["pytorch", "safetensors"],
    deps=["target_model", "recipe", "tokenized_train"],
    check_specs=[_check("training_features")],
    pool=GPU_POOL,
)
def training_features(
    context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
) -> dg.MaterializeResult:
    """Hidden states of the training samples: only what the store does not hold yet is computed."""
    return captured(context, workspace, launcher, "training_features", "tokenized_train")


@asset(
    group=GROUP,
    kinds=["pytorch", "safetensors"],
    deps=["target_model", "recipe", "heldout_responses"],
    check_specs=[_check("heldout_eval_features")],
    pool=GPU_POOL,
)
def heldout_eval_features(
    context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
) -> dg.MaterializeResult:
    """Hidden states of the held-out samples, which every evaluation of every draft reads."""
    return captured(context, workspace, launcher, "heldout_eval_features", "heldout_responses", TOKENS_FOLDER)
