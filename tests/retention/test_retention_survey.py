"""What a survey finds in use, and what may go."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from retention_toys import WEIGHTS, keys_of, make_features, make_place, make_result
from service_toys import record, served

from draftworks.data.slices import WEIGHTS_FILE, SlicePlan, save_plan
from draftworks.errors import ConfigError, StoreError
from draftworks.retention.removable import Place
from draftworks.retention.stored_results import FOLDER, list_pins, pin_result, unpin_result
from draftworks.retention.survey import Holding, survey
from draftworks.service.register import ServiceRegister
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.identity import FileDigests
from draftworks.targets.gguf_store import identify_gguf
from draftworks.targets.registry import Registry


def list_names(place: Place) -> set[str]:
    return {item.name for item in survey(place).candidates}


def name(result) -> str:
    return f"{result.asset} {result.path.name}"


def test_what_a_current_result_was_made_from_stays_and_the_rest_may_go(tmp_path: Path):
    old_tokens = make_result(tmp_path, "tokenized_train", step=1)
    tokens = make_result(tmp_path, "tokenized_train", step=2)
    draft = make_result(tmp_path, "x_draft", tokens=tokens.data_version, lr=1)
    other = make_result(tmp_path, "x_draft", tokens=old_tokens.data_version, lr=2)
    assert list_names(make_place(tmp_path)) == {name(draft)}  # the current draft is of the older tokens
    make_result(tmp_path, "x_draft", tokens=tokens.data_version, lr=1)
    assert list_names(make_place(tmp_path)) == {name(other), name(old_tokens)}


def test_a_pin_keeps_a_result_and_what_it_was_made_from(tmp_path: Path):
    tokens = make_result(tmp_path, "tokenized_train", step=1)
    draft = make_result(tmp_path, "x_draft", tokens=tokens.data_version)
    make_result(tmp_path, "tokenized_train", step=2)
    make_result(tmp_path, "x_draft", tokens="other")
    pin_result(ArtifactStore(tmp_path), "x_draft", "a", draft.path.name, "for the paper")
    assert list_names(make_place(tmp_path)) == set()
    [pin] = list_pins(tmp_path)
    assert (pin.why, pin.result) == ("for the paper", draft.path.relative_to(tmp_path))
    unpin_result(tmp_path, "x_draft", "a", draft.path.name)
    assert list_names(make_place(tmp_path)) == {name(draft), name(tokens)}


def test_a_draft_in_service_stays_with_the_last_two_and_every_report(tmp_path: Path):
    made = []
    for lr in range(5):
        draft = make_result(tmp_path, "eagle3_draft", lr=lr)
        export = make_result(tmp_path, "eagle3_export", draft=draft.path.name)
        made.append((draft, export, make_result(tmp_path, "eagle3_report", draft_identity=draft.path.name)))
    register = ServiceRegister(tmp_path, "a", "eagle3")
    for number, (draft, export, report) in enumerate(made[:4], start=1):
        served_draft = replace(
            served(draft.path.name), path=str(export.path.relative_to(tmp_path)), report=report.path.name
        )
        promoted = replace(record(number, draft.path.name), target="a", strategy="eagle3", draft=served_draft)
        register.replace(made[number - 2][0].path.name if number > 1 else None, lambda _, new=promoted: new)
    assert list_names(make_place(tmp_path)) == {name(made[0][0]), name(made[0][1])}
    (register.folder / "in_service.json").write_text("{")
    with pytest.raises(StoreError):
        survey(make_place(tmp_path))


def test_the_report_that_weights_were_made_from_stays_while_their_data_is_current(tmp_path: Path):
    fallen = make_result(tmp_path, "eagle3_report", draft_identity="a", step=1)
    other = make_result(tmp_path, "eagle3_report", draft_identity="a", step=2)
    make_result(tmp_path, "eagle3_report", draft_identity="b")
    data = make_result(tmp_path, "conversations", step=1)
    save_plan(data.path / WEIGHTS_FILE, SlicePlan("a", "eagle3", "heldout", fallen.path.name, "promoted", 3.0, ()))
    assert list_names(make_place(tmp_path)) == {name(other)}
    make_result(tmp_path, "conversations", step=2)
    assert list_names(make_place(tmp_path)) == {name(other), name(fallen), name(data)}


def test_results_of_a_target_that_the_registry_lacks_may_go(tmp_path: Path):
    gone = make_result(tmp_path, "x_draft", target="gone")
    kept = make_result(tmp_path, "x_draft", target="a")
    [item] = survey(make_place(tmp_path)).candidates
    assert (item.name, item.why) == (name(gone), "its target is not in the registry")
    assert kept.path.exists()


def test_features_stay_that_any_set_in_use_names_of_whichever_target(tmp_path: Path):
    make_features(tmp_path, [1, 2], "old")
    make_features(tmp_path, [2, 3], "new")
    make_features(tmp_path, [4], "other", target="b")
    items = [item for item in survey(make_place(tmp_path, targets=("a", "b"))).candidates if item.kind == "features"]
    assert {key for item in items for file in item.features.files for key in file.keys} == keys_of(1)
    assert {item.targets for item in items} == {frozenset({"a", "b"})}
    assert all(item.nbytes > 0 and item.seconds < 10 for item in items)


@pytest.mark.parametrize("days", [1, 10])
def test_what_is_young_stays(tmp_path: Path, days: int):
    make_features(tmp_path, [1], "old")
    make_features(tmp_path, [2], "new")
    place = make_place(tmp_path, keep_days=days)
    found = survey(replace(place, now=place.now + 5 * 86400)).candidates
    assert {item.kind for item in found} == ({"features", "data"} if days == 1 else set())


def test_runs_streams_and_unfinished_results_have_their_own_kinds(tmp_path: Path):
    for folder in ("runs/1234", "streams/a/0123", "x_draft/a/feed.partial"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text("12345")
    found = survey(make_place(tmp_path))
    assert {(item.kind, item.name) for item in found.candidates} == {
        ("runs", "run 1234"),
        ("unfinished", "streams 0123"),
        ("unfinished", "x_draft feed.partial"),
    }
    assert found.totals == {"runs": 5, "unfinished": 10}
    assert not survey(make_place(tmp_path, keep_days=1, runs_days=1)).candidates


def test_dequantised_gguf_files_go_once_no_target_names_them(tmp_path: Path):
    """Where that is not known, as of an entry whose file is away, none goes."""
    registry, var = Registry(tmp_path / "registry"), tmp_path / "var"
    (registry.root / "targets").mkdir(parents=True)
    (registry.root / "deployment.yaml").write_text("var: ../var\nretention: {keep_days: 0}\n")
    (registry.root / "targets" / "a.yaml").write_text("model: model.gguf\ndataset: d\n")
    file = registry.root / "model.gguf"
    file.write_bytes(b"GGUF")
    named = identify_gguf(registry.read_target("a"), registry, FileDigests(var / "digests.json"))
    for name in (named, "0123456789abcdef"):
        (var / "gguf" / name).mkdir(parents=True)
        (var / "gguf" / name / "model.safetensors").write_text("weights")
        (var / "gguf" / f"{name}.lock").mkdir()
    later = time.time() + 60
    assert [each.name for each in survey(replace(Place.of(registry), now=later)).candidates] == [
        "model 0123456789abcdef"
    ]
    file.rename(file.with_name("away.gguf"))
    assert survey(replace(Place.of(registry), now=later)).candidates == ()


def test_sizes_are_by_kind_and_owner(tmp_path: Path):
    made = make_result(tmp_path, "x_export")
    size = sum(path.stat().st_size for path in made.path.rglob("*"))
    assert survey(make_place(tmp_path)).sizes == {Holding("exports", "a"): size}


@pytest.mark.parametrize("damage", ["manifest.json", "refs.jsonl"])
def test_a_set_in_use_that_cannot_be_read_stops_everything(tmp_path: Path, damage: str):
    made = make_features(tmp_path, [1], "tokens")
    (made.path / damage).write_text("{")
    with pytest.raises(StoreError, match="a feature set in use cannot be read"):
        survey(make_place(tmp_path))


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 2}', "[]"])
def test_a_pin_that_cannot_be_read_stops_everything(tmp_path: Path, content: str):
    made = make_result(tmp_path, "x_draft")
    pin_result(ArtifactStore(tmp_path), "x_draft", "a", None, "")
    (tmp_path / FOLDER / "x_draft" / "a" / f"{made.path.name}.json").write_text(content)
    with pytest.raises(StoreError, match="not a pin"):
        survey(make_place(tmp_path))


def test_a_result_whose_record_is_damaged_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    made, _ = make_result(tmp_path, "x_draft", lr=1), make_result(tmp_path, "x_draft", lr=2)
    (made.path / "artifact.json").write_text("{")
    assert list_names(make_place(tmp_path)) == set()
    assert "its record cannot be read" in caplog.text


@pytest.mark.parametrize("wrong", ["0000000000000000", "../a"])
def test_what_is_not_there_cannot_be_pinned(tmp_path: Path, wrong: str):
    make_result(tmp_path, "x_draft")
    with pytest.raises(StoreError, match="no result"):
        pin_result(ArtifactStore(tmp_path), "x_draft", "a", wrong, "")
    with pytest.raises((StoreError, ValueError), match=r"not pinned|not a name"):
        unpin_result(tmp_path, "x_draft", "a", wrong)


def test_a_registry_without_targets_is_refused(tmp_path: Path):
    (tmp_path / "targets").mkdir()
    with pytest.raises(ConfigError, match=r"found none|expected"):
        Place.of(Registry(tmp_path))


def test_a_place_is_that_of_the_deployment(tmp_path: Path):
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "a.yaml").write_text("model: [broken")
    (tmp_path / "deployment.yaml").write_text("var: v\nretention: {keep_days: 3, budget_gb: {features: 2}}\n")
    (tmp_path / "v" / "feature_store" / WEIGHTS).mkdir(parents=True)
    (tmp_path / "v" / "feature_store" / "not-weights").mkdir(parents=True)
    place = Place.of(Registry(tmp_path))
    assert (place.var, place.targets) == (tmp_path / "v", frozenset({"a"}))
    assert [store.root.name for store in place.stores] == [WEIGHTS]
    assert (place.settings.keep_days, place.settings.budgets) == (3, {"features": 2_000_000_000})
    shutil.rmtree(tmp_path / "v")
    assert Place.of(Registry(tmp_path)).stores == ()
