"""Reports measure the drafts that exist, and wait for those that do not."""

from __future__ import annotations

import shutil

import dagster as dg


def made(result: dg.ExecuteInProcessResult) -> set[str]:
    return {event.asset_key.to_user_string() for event in result.get_asset_materialization_events()}


def test_evaluating_a_strategy_without_a_draft_yields_no_report_and_says_why(finished, tmp_path, capfd):
    site = finished.site.copy(tmp_path)
    for name in ("eagle3_draft", "eagle3_report"):
        shutil.rmtree(site.var / name)
    result = site.run("evaluate")
    assert result.success
    assert "heldout_eval_features" in made(result)
    assert "eagle3_report" not in made(result)
    assert "target small has no eagle3 draft yet: nothing to do" in capfd.readouterr().err
    assert not any(check.asset_key == dg.AssetKey("eagle3_report") for check in result.get_asset_check_evaluations())
