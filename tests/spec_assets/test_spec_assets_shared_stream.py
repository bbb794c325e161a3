"""With `streaming.share`, one step trains the drafts of a run from one stream; each is published as its own asset."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from coverings import gate_or_long

from draftworks.errors import ConfigError
from draftworks.preflight.compatibility import check_requirements
from draftworks.storage.artifacts import ArtifactStore
from draftworks.stream.controller import DataFlowController
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.targets.registry import Registry
from resources.torch_launcher import TorchLauncher
from resources.workspace import Workspace

DFLASH = {
    "options": {
        "block_size": 3,
        "num_layers": 1,
        "layer_ids": [2, 4],
        "num_anchors": 8,
        "mask_token_id": 0,
        "intermediate_size": 32,
    },
    "training": {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "epochs": 1,
        "compute_dtype": "float32",
        "device": "cpu",
    },
    "export": {"formats": []},
}
MADE = ("training_features", "eagle3_draft", "dflash_draft")


def make_shared(finished_site: Any, root: Path, changed: str = "dflash", **training: Any) -> Any:
    """The finished site with a second strategy, before any feature or draft was made, with a shared stream."""
    site = finished_site.copy(root)
    for made in MADE:
        shutil.rmtree(site.var / made / "small", ignore_errors=True)
    entry = yaml.safe_load(site.target_file.read_text())
    entry["strategies"]["eagle3"]["training"]["processes"] = 1
    entry["strategies"]["dflash"] = DFLASH
    own = entry["strategies"][changed]
    entry["strategies"][changed] = {**own, "training": {**own["training"], **training}}
    entry["streaming"] = {"watermark": {"samples": 16}, "share": True}
    site.target_file.write_text(yaml.safe_dump(entry))
    return site


def run(site: Any) -> dg.ExecuteInProcessResult:
    chosen = [dg.AssetKey(name) for name in MADE]
    return site.run(asset_selection=chosen, instance=dg.DagsterInstance.ephemeral())


def metadata_of(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    found = [m for m in result.get_asset_materialization_events() if m.asset_key == dg.AssetKey(name)]
    return {key: value.value for key, value in found[0].materialization.metadata.items()}


def list_producer_runs(site: Any) -> list[Path]:
    return list((site.var / "runs").glob("*/*/produce/*/out.log"))


def test_one_step_trains_both_drafts_and_the_other_step_finds_its_own(finished_site, tmp_path):
    site = make_shared(finished_site, tmp_path)
    before = len(list_producer_runs(site))
    result = run(site)
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    assert len(list_producer_runs(site)) == before + 1
    shown = {name: metadata_of(result, f"{name}_draft") for name in ("eagle3", "dflash")}
    assert sorted(each["cache"] for each in shown.values()) == ["built", "hit"]
    rows = metadata_of(result, "training_features")["dagster/row_count"]
    for each in shown.values():
        assert each["streamed_together"] == "dflash, eagle3"
        assert each["streamed_samples"] == rows
    found, expected = (
        ArtifactStore(root).load_current("eagle3_draft", "small") for root in (site.var, finished_site.var)
    )
    assert found.path.name == expected.path.name
    assert found.summary["last_loss"] == pytest.approx(expected.summary["last_loss"], rel=1e-3)
    assert not list((site.var / "streams").rglob("*.safetensors"))
    assert not list((site.var / "streams").rglob("*.sqlite"))


@pytest.mark.parametrize(
    ("failing", "other"), gate_or_long([("dflash", "eagle3"), ("eagle3", "dflash")], [("dflash", "eagle3")])
)
def test_a_draft_that_fails_leaves_the_other_its_stream_and_says_why(finished_site, tmp_path, failing: str, other: str):
    """Whichever of the two steps comes first: the one that fails is its own draft's or that of the other."""
    site = make_shared(finished_site, tmp_path, failing, best_metric="no_such_metric")
    before = len(list_producer_runs(site))
    result = run(site)
    assert not result.success
    assert metadata_of(result, f"{other}_draft")["steps"] > 0
    failed = [event for event in result.all_events if event.is_step_failure]
    assert [event.step_key for event in failed] == [f"{failing}_draft"]
    assert "no_such_metric" in failed[0].step_failure_data.user_failure_data.description
    assert len(list_producer_runs(site)) <= before + 2, "the failed draft's own step tries once more"


@pytest.mark.long
def test_an_interrupted_step_saves_both_trainings_and_the_next_run_goes_on_with_both(
    finished_site, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    site = make_shared(finished_site, tmp_path, epochs=3)
    look = TorchLauncher._look

    def interrupt(self: TorchLauncher, *args: Any) -> None:
        look(self, *args)
        steps = read_steps(site)
        if len(steps) == 2 and min(steps.values()) >= 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TorchLauncher, "_look", interrupt)
        assert not run(site).success
    assert min(read_steps(site).values()) >= 3
    (database,) = find_databases(site)
    result = run(site)
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    for name in ("eagle3_draft", "dflash_draft"):
        summary = ArtifactStore(site.var).load_current(name, "small").summary
        assert [each["from_step"] >= 3 for each in summary["sessions"]] == [False, True]
        assert summary["stream"]["together"] == ["dflash", "eagle3"]
    assert not database.exists()


def find_databases(site: Any) -> list[Path]:
    return list((site.var / "streams" / "small").glob("*/control.sqlite"))


def read_steps(site: Any) -> dict[str, int]:
    """The steps that each training of the stream has acknowledged."""
    for database in find_databases(site):
        controller = DataFlowController("draft", SQLiteMetadataStore(database))
        progress = controller.read_consumers()
        controller.close()
        return {name: each.acked_step for name, each in progress.items()}
    return {}


def test_strategies_with_different_schedules_are_refused_before_anything_is_made(finished_site, tmp_path):
    site = make_shared(finished_site, tmp_path, seed=7)
    registry = Registry(site.registry)
    files = Workspace(registry_root=str(site.registry)).resolve_target_files("small")
    with pytest.raises(ConfigError, match="dflash and eagle3 cannot follow one stream: seed is 7 and 42"):
        check_requirements(registry.load_target("small"), files, registry)
