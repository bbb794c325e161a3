"""Check that a decision that is to act by itself has a budget. Torch-free."""

from __future__ import annotations

from draftworks.config.registry_files import TargetSpec
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
