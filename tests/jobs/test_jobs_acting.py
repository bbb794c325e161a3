"""The jobs that decisions start make a draft with all that it is made from."""

from __future__ import annotations

from pathlib import Path

from acting_fleet import ActingFleet

from spec_assets.code_location import build_definitions


def test_a_training_makes_all_that_its_draft_needs_and_no_other_draft(tmp_path: Path):
    acting = ActingFleet(tmp_path)
    acting.add("one")
    repository = build_definitions(acting.fleet.registry).get_repository_def()
    for name in ("retrain_eagle3", "tune_eagle3"):
        keys = repository.get_job(name).asset_layer.executable_asset_keys
        made = {key.to_user_string() for key in keys}
        assert {"conversations", "training_features", "heldout_eval_features"} <= made
        assert {f"eagle3_{what}" for what in ("draft", "report", "export", "promoted", "decision")} <= made
        assert not made & {"dflash_draft", "fp8_gate", "leaderboard"}
