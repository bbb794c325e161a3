"""Check that decisions about drafts in service have what they need: a budget, and enough prompts. Torch-free."""

from __future__ import annotations

from draftworks.config.registry_files import TargetSpec
from draftworks.config.service import LEAST_PROMPTS
from draftworks.preflight.findings import Findings
from draftworks.targets.registry import Registry


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
