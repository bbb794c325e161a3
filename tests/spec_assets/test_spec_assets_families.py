"""The first step of a run takes a target of every family, with a draft of every strategy that trains for it."""

from __future__ import annotations

from collections.abc import Callable

import dagster as dg
import pytest
import yaml
from model_families import DRAFT_OPTIONS, FAMILIES
from mtp_toys import KINDS

from draftworks.config.run_files import TargetFiles

MakeTarget = Callable[[str], TargetFiles]


@pytest.mark.long
def test_the_first_step_takes_a_target_of_every_family(site, family_target: MakeTarget, mtp_target: MakeTarget):
    """One after another in one test: each has the whole Dagster run that a user's target has."""
    small = yaml.safe_load(site.target_file.read_text())
    drafts = {name: {"options": options} for name, options in DRAFT_OPTIONS.items()}
    unscaled = {**drafts, "xpress": {**drafts["xpress"], "export": {"formats": []}}}  # its one format is of bare rows
    targets = {name: (family_target(name), unscaled if "gemma" in name else drafts) for name in FAMILIES}
    targets |= {f"{kind}_mtp": (mtp_target(kind), {"mtp": {}}) for kind in KINDS}
    for name, (files, strategies) in targets.items():
        entry = {**small, "model": files.model, "strategies": strategies}
        (site.registry / "targets" / f"{name}.yaml").write_text(yaml.safe_dump(entry))
    job, failed = site.definitions().resolve_job_def("resolve"), {}
    for name in targets:
        result = job.execute_in_process(
            partition_key=name, asset_selection=[dg.AssetKey("target_model")], raise_on_error=False
        )
        if not result.success:
            failed[name] = result.failure_data_for_node("target_model").user_failure_data.description
    assert failed == {}
