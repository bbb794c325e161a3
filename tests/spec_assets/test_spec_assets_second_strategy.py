"""A second strategy captures only its own taps; results of the first stay as they are."""

from __future__ import annotations

import dagster as dg
import pytest

from draftworks.storage.artifacts import ArtifactStore

DFLASH = """
  dflash:
    options: {block_size: 3, num_layers: 1, layer_ids: [2, 3, 5], num_anchors: 8, mask_token_id: 0, intermediate_size: 32}
    training: {global_batch_size: 8, micro_batch_size: 4, epochs: 1, lr: 0.002, compute_dtype: float32, device: cpu, log_every: 2}
    export: {formats: []}
"""


def cached(result: dg.ExecuteInProcessResult) -> dict[str, str]:
    """Whether each asset was built or found, by name."""
    shown = {e.asset_key.to_user_string(): e.materialization for e in result.get_asset_materialization_events()}
    return {name: made.metadata["cache"].value for name, made in shown.items() if "cache" in made.metadata}


@pytest.mark.long
def test_a_strategy_with_another_tap_captures_that_alone_and_trains_nothing_else_again(finished_site, tmp_path):
    site = finished_site.copy(tmp_path)
    before = ArtifactStore(site.var).load_current("training_features", "small").summary
    site.target_file.write_text(site.target_file.read_text() + DFLASH)
    result = site.run()
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    found = cached(result)
    after = ArtifactStore(site.var).load_current("training_features", "small").summary
    assert set(after["streams"]) - set(before["streams"]) == {"hf3"}
    assert after["captured_bytes"] == before["bytes"] // len(before["streams"])
    assert {name: found[name] for name in ("eagle3_draft", "eagle3_report", "eagle3_export")} == {
        "eagle3_draft": "hit",
        "eagle3_report": "hit",
        "eagle3_export": "hit",
    }
    assert {found[f"dflash_{name}"] for name in ("draft", "report")} == {"built"}
    assert "dflash_export" not in found


def test_what_a_draft_does_not_read_is_not_in_its_identity(finished_site):
    made = ArtifactStore(finished_site.var)
    streams = ["hf2", "hf4", "hf5", "last"]
    for asset in ("eagle3_draft", "eagle3_report"):
        answers, features = made.load_current(asset, "small").identity["heldout"]
        assert answers == made.load_current("heldout_responses", "small").data_version
        assert sorted(features) == streams
