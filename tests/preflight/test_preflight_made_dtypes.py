"""A machine that would make results again, only since it chooses another dtype, says so before it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftworks.preflight.findings import Findings
from draftworks.preflight.plausible_values import check_made_dtypes
from draftworks.storage.artifacts import Artifact
from draftworks.storage.names import TRAINING_FEATURES, of_strategy
from draftworks.targets.fitted_defaults import Machine

DRAFT = of_strategy("eagle3").draft


class Made:
    """Results of the target `small`, each with its record of a dtype."""

    def __init__(self, features: str | None, draft: str | None) -> None:
        kept = {TRAINING_FEATURES: ("capture", features), DRAFT: ("training", draft)}
        self.identities = {asset: {key: {"compute_dtype": dtype}} for asset, (key, dtype) in kept.items() if dtype}

    def find(self, asset: str, target: str) -> Artifact | None:
        identity = self.identities.get(asset)
        return identity and Artifact(asset, target, Path("/nowhere"), identity, "v", {}, {}, 0.0, 0.0)


def warn(fleet, made: Made, **entry: Any) -> list[str]:
    fleet.write(**entry)
    findings = Findings()
    check_made_dtypes(fleet.registry.load_target("small"), fleet.registry, made, findings)  # type: ignore[arg-type]
    return [one.text for one in findings.found if one.severity == "warning"]


@pytest.mark.parametrize(("bfloat16", "chosen"), [(False, "float32"), (True, "bfloat16")])
def test_results_of_another_dtype_are_named_and_those_of_the_same_are_not(fleet, monkeypatch, bfloat16, chosen):
    machine = Machine(0, False, bfloat16)
    monkeypatch.setattr("draftworks.targets.fitted_defaults.read_machine", lambda: machine)
    other = "bfloat16" if chosen == "float32" else "float32"
    assert warn(fleet, Made(None, None)) == []
    assert warn(fleet, Made(chosen, chosen)) == []
    features, draft = warn(fleet, Made(other, other))
    assert f"capture.compute_dtype: features had {other}, the default here is {chosen}" in features
    assert f"strategies.eagle3.training.compute_dtype: its draft had {other}" in draft
    assert draft.endswith(f"set compute_dtype to {other}")


def test_a_dtype_that_the_entry_names_is_meant(fleet, monkeypatch):
    machine = Machine(0, False, True)
    monkeypatch.setattr("draftworks.targets.fitted_defaults.read_machine", lambda: machine)
    trained = {"eagle3": {"options": {"draft_vocab_size": 64}, "training": {"compute_dtype": "float32"}}}
    entry = {"capture": {"compute_dtype": "float32"}, "strategies": trained}
    assert warn(fleet, Made("bfloat16", "bfloat16"), **entry) == []
