"""Feature assets: hidden states of the target at all taps that its strategies need, in one content-addressed store."""

from pathlib import Path

import dagster as dg

from draftworks.config.run_files import CaptureRun
from draftworks.planning.identities import PLANNED
from draftworks.preflight.plausible_values import require_passed_fp8_gate
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.names import RECIPE, TARGET_MODEL, TOKENIZED_TRAIN, TRAINING_FEATURES
from draftworks.targets.training_data import collect_taps
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace
from spec_assets.common import asset, launch, obtain_result, report_result
from spec_assets.metadata import format_bytes
from spec_assets.workers import launch_workers

GROUP = "features"
VERIFIED = "features_verified"
VERIFIED_MEANS = (
    "Samples read back: finite, a row per token, equal to a new capture, and the target's own head on `last` gives the "
    "engine's logits. The engine's streams of a few prompts were those of the target's own weights (`probe` names those "
    "that were not compared). A capture that was interrupted equals the "
    "undisturbed one bit for bit with backend hf, and to rounding with another backend or where data was added later."
)
VERIFICATIONS = ("rows_equal_tokens", "finite", "features_as_captured", "head_equals_logits")


@asset(
    group=GROUP,
    kinds=["pytorch", "safetensors"],
    deps=[TARGET_MODEL, RECIPE, TOKENIZED_TRAIN],
    check_specs=[dg.AssetCheckSpec(VERIFIED, asset=TRAINING_FEATURES, blocking=True, description=VERIFIED_MEANS)],
    program="capture",
)
def training_features(
    context: dg.AssetExecutionContext, workspace: Workspace, launcher: dg.ResourceParam[TorchLauncher]
) -> dg.MaterializeResult:
    """Hidden states of the training samples: only what the store does not hold yet is computed.

    For a target with `streaming`, the plan of these features: they are captured while a draft is trained on them.
    """
    target = context.partition_key
    spec = workspace.registry.load_target(target)
    files = workspace.resolve_target_files(target)
    tokens = workspace.artifacts.load_current(TOKENIZED_TRAIN, target)
    store = workspace.locate_feature_store(files)
    require_passed_fp8_gate(workspace.artifacts, spec, files.digest, list(spec.strategies))

    def build(out: Path) -> BuildResult:
        run = CaptureRun(
            out=out,
            target=files,
            tokens=tokens.path,
            taps=collect_taps(spec, files.num_layers),
            capture=spec.capture,
            store=store,
            sglang=workspace.sglang,
            vllm=workspace.vllm,
        )
        python = workspace.find_python(spec.capture)
        device = spec.capture.device
        if spec.streaming is None:
            job = launch_workers(context, launcher, workspace, "capture", run, spec.capture.processes, device, python)
        else:
            job = launch(context, launcher, workspace, "plan", run, 1, device, python)
        return BuildResult(data_version=job.report["data_version"], summary=job.report)

    def still_stored(artifact: Artifact) -> bool:
        if artifact.summary.get(PLANNED):
            return spec.streaming is not None
        from draftworks.features.open_store import holds_feature_set

        return holds_feature_set(store, artifact.path)

    artifact = obtain_result(context, workspace, build, still_good=still_stored)
    check = judge_verification(artifact, check_name=VERIFIED, asset_key=TRAINING_FEATURES)
    return report_result(context, artifact, describe_features(artifact), [check])


def describe_features(artifact: Artifact) -> dict:
    summary = artifact.summary
    return {
        "dagster/row_count": summary["samples"],
        "tokens": summary["tokens"],
        "captured_samples": summary["captured_samples"],
        "failed_samples": summary.get("failed_samples", 0),
        "captured_bytes": format_bytes(summary["captured_bytes"]),
        "bytes": format_bytes(summary["bytes"]),
        "bytes_per_token": summary["bytes_per_token"],
        "tokens_per_second": summary["tokens_per_second"],
        "streams": ", ".join(summary["streams"]),
        **({PLANNED: "captured while a draft is trained on them"} if summary.get(PLANNED) else {}),
    }


def judge_verification(artifact: Artifact, **options: str) -> dg.AssetCheckResult:
    """Return the check of the samples that were read back and captured again. Options are those of
    `AssetCheckResult`."""
    verification = artifact.summary["verification"]
    probe = artifact.summary.get(
        "probe", {"probe": "not compared with the target's own weights: captured before they were"}
    )
    return dg.AssetCheckResult(
        passed=all(verification[name] for name in VERIFICATIONS),
        severity=dg.AssetCheckSeverity.ERROR,
        metadata={**verification, **probe},
        **options,
    )
