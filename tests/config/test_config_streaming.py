"""What a streamed training keeps is decided by the budget, unless the target says it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from draftworks.config.features import StreamingSpec
from draftworks.config.run_files import StoreSpec, StreamPlace


@pytest.mark.parametrize(("nbytes", "kept"), [(2_000_000_000, "until_last_use"), (2_000_000_001, "capture_again")])
def test_auto_keeps_features_that_fit_into_the_budget(nbytes: int, kept: str):
    assert StreamingSpec().resolve_keep(nbytes, budget_gb=2.0).keep == kept


@pytest.mark.parametrize("keep", ["until_last_use", "capture_again"])
def test_what_the_target_says_is_not_changed(keep: str):
    assert StreamingSpec(keep=keep).resolve_keep(10**15, budget_gb=1.0).keep == keep


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"watermark": {"samples": 0}},
            {"watermark": {"samples": None}},
            {"keep": "always"},
            {"timeout_s": 0},
            {"lease": 3},
        ),
        *({"control": {"listen": listen}} for listen in ("", "host", "host:x", ":1", "host:70000", "a b:1")),
    ],
)
def test_impossible_settings_are_refused(wrong: dict):
    with pytest.raises(ValidationError):
        StreamingSpec(**wrong)


@pytest.mark.parametrize("control_plane", [{}, {"database": "plane.db", "control": "10.0.0.1:7420"}])
def test_a_stream_has_one_control_plane(control_plane: dict):
    with pytest.raises(ValidationError, match="expected either database or control"):
        StreamPlace(store=StoreSpec(root="features"), **control_plane)
