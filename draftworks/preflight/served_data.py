"""Checks of served prompts and mixes that their entries show: answers, and eval sets that would be trained on. Torch-free."""

from __future__ import annotations

from draftworks.config.registry_files import TargetSpec
from draftworks.data.sources import SERVED
from draftworks.errors import ConfigError
from draftworks.preflight.findings import Findings
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import load_slice_plan, load_training_datasets


def check_served_data(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that served prompts are answered again, that no eval set of a mix is trained on, and that weights can be read."""
    try:
        trained = {spec.name: spec for spec in load_training_datasets(target, registry)}
    except ConfigError:
        return  # reported with the data sets
    where = f"target {target.name}"
    served = [name for name, spec in trained.items() if spec.format == SERVED]
    if served and target.responses.mode == "passthrough":
        findings.error(f"{where}: data set {served[0]} holds prompts without answers: set responses.mode to regenerate")
    for name in filter(registry.list_eval_sets().__contains__, target.evals):
        with findings.collect_errors():
            spec = registry.load_eval_set(name)
            if spec.dataset in trained and spec.part == "all" and (target.mix is not None or spec.dataset in served):
                findings.error(
                    f"{where}: eval set {name}: drafts are trained on its data set {spec.dataset}: set part to held_out"
                )
    with findings.collect_errors():
        load_slice_plan(target, registry)
