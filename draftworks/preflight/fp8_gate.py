"""Whether a target may be trained on features in fp8: what its gate found, by the limit that its registry entry has now.

The gate is a permission and no input: nothing that is made depends on its figures, so no asset depends on it in Dagster's
sense, and another figure makes nothing stale. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from draftworks.config.registry_files import TargetSpec
from draftworks.errors import DraftworksError
from draftworks.preflight.findings import Findings
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.asset_names import FP8_GATE

if TYPE_CHECKING:
    from draftworks.evaluation.ladder.relative_loss import RelativeLoss


class Fp8GateClosed(DraftworksError):
    """Raised where features in fp8 are asked for and the comparison that this needs has not passed."""


def read_verdicts(gate: Artifact, max_loss: float) -> dict[str, RelativeLoss]:
    """Return what a gate found, by strategy, judged by a limit."""
    from draftworks.evaluation.ladder.relative_loss import RelativeLoss

    return {name: RelativeLoss.from_json(v).judge_by(max_loss) for name, v in gate.summary["strategies"].items()}


def require_passed_fp8_gate(
    artifacts: ArtifactStore, target: TargetSpec, weights: str, strategies: Iterable[str]
) -> None:
    """Check that drafts of these strategies may be trained on the features of the target's entry.

    Args:
        weights: digest of the target's weights.

    Raises:
        Fp8GateClosed: `capture.storage` is an fp8 one, and the gate has not passed for it and these weights.
    """
    storage = target.capture.storage
    if storage == "plain" or target.gates.fp8_ungated:
        return
    where = f"target {target.name}: capture.storage is {storage}"
    advice = f"Run: draftworks run judge_fp8 --target {target.name}, or set capture.storage to plain"
    gate = artifacts.find(FP8_GATE, target.name)
    if gate is None:
        raise Fp8GateClosed(f"{where}, and what drafts lose by that was not measured. {advice}")
    if (gate.identity["target"], gate.identity["storage"]) != (weights, storage):
        raise Fp8GateClosed(
            f"{where}, and what drafts lose by that was measured for storage {gate.identity['storage']} and weights "
            f"{gate.identity['target'][:12]}, not for these ({weights[:12]}). {advice}"
        )
    verdicts = read_verdicts(gate, target.gates.fp8_max_loss)
    for name in strategies:
        if name not in verdicts:
            raise Fp8GateClosed(f"{where}, and what {name} drafts lose by that was not measured. {advice}")
        if verdicts[name].verdict != "passed":
            raise Fp8GateClosed(
                f"{where}, {name}: {verdicts[name].describe()}. Set capture.storage to "
                f"{'fp8_taps or ' if storage == 'fp8' else ''}plain, measure more (gates.fp8_samples, fp8_seeds, fp8_steps, "
                f"or more held-out prompts), or train on it nevertheless with gates.fp8_ungated"
            )


def check_fp8_gate(artifacts: ArtifactStore, target: TargetSpec, weights: str, findings: Findings) -> None:
    """Warn if the gate has not passed: jobs that train end at the first step then, and `judge_fp8` may come first."""
    try:
        require_passed_fp8_gate(artifacts, target, weights, target.strategies)
    except DraftworksError as error:
        findings.warning(str(error))
