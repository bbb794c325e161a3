"""Checks by which a gate, a decision or a vocabulary of an entry could never do what it is for. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from draftworks.config.registry_files import TargetSpec
from draftworks.config.service import LEAST_PROMPTS
from draftworks.errors import DraftworksError
from draftworks.preflight.findings import Findings
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.names import FP8_GATE, VOCAB_MAPPING
from draftworks.targets.registry import Registry
from draftworks.targets.shared_needs import resolve_draft_vocab_size

if TYPE_CHECKING:
    from draftworks.evaluation.ladder.relative_loss import RelativeLoss


def check_decision(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Warn of a decision that acts, where the deployment has no budget: then nothing starts by itself."""
    act = "none" if target.decision is None else target.decision.act
    if act != "none" and registry.load_deployment().budget is None:
        findings.warning(
            f"target {target.name}: decision.act is {act}, and deployment.yaml has no budget: nothing starts by itself. Add a "
            "budget, or leave act out"
        )


def check_least_prompts(target: TargetSpec, findings: Findings) -> None:
    """Warn of a number of prompts below which promotions and decisions err more often than they say."""
    for name, spec in (("service", target.service), ("decision", target.decision)):
        if spec is not None and spec.least_prompts < LEAST_PROMPTS:
            findings.warning(
                f"target {target.name}: {name}.least_prompts: found {spec.least_prompts}; below {LEAST_PROMPTS} a draft that "
                "lost a part of the traffic passes too often (docs/benchmarks.md). Raise it, or remove it"
            )


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


HELDOUT_COVERAGE = "heldout_coverage"
LEAST_COVERAGE = 0.95
"""Share of held-out labels below which the vocabulary is worth a word: it caps what any draft can have accepted."""


def check_coverage(target: TargetSpec, artifacts: ArtifactStore, findings: Findings) -> None:
    """Warn of a vocabulary that a run before has found to lack many held-out labels, where its size is still asked for."""
    with suppress(DraftworksError):  # sizes that differ and damaged results are told by who needs them
        made, size = artifacts.find(VOCAB_MAPPING, target.name), resolve_draft_vocab_size(target)
        if made is not None and made.summary.get("draft_vocab_size") == size and is_low(made):
            findings.warning(f"target {target.name}: {describe_coverage(made)}")


def is_low(made: Artifact) -> bool:
    """Whether a mapping lacks more of the held-out labels than `LEAST_COVERAGE` leaves; a mapping from before: no."""
    return made.summary.get(HELDOUT_COVERAGE, 1.0) < LEAST_COVERAGE


def describe_coverage(made: Artifact) -> str:
    """Return the shares of labels that a mapping has, and what follows."""
    size, of = made.summary["draft_vocab_size"], made.summary["vocab_size"]
    return (
        f"the draft's vocabulary ({size:,} of {of:,} tokens) has {made.summary[HELDOUT_COVERAGE]:.1%} of the held-out labels "
        f"({made.summary['coverage']:.1%} of those trained on): no draft is right more often. Raise draft_vocab_size, or train "
        "on more answers"
    )
