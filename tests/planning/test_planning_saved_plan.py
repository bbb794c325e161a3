"""Saved plans: kept for the run that they were made for, refused where damaged, empty where nothing is left to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planning_toys import PlannedTarget

from draftworks.errors import StoreError
from draftworks.planning.plan import compare_plan, load_plan, locate_plan, save_plan


def test_a_run_that_goes_on_keeps_the_plan_of_its_beginning(tmp_path: Path):
    target = PlannedTarget(tmp_path)
    var = target.artifacts.root
    assert load_plan(var, "one") is None
    assert save_plan(var, target.plan())
    first = load_plan(var, "one")
    assert first is not None
    target.digest_files()  # the run has begun
    assert not save_plan(var, target.plan())
    assert load_plan(var, "one") == first
    target.edit(max_length=512)
    assert save_plan(var, target.plan())
    assert load_plan(var, "one") != first


def test_a_saved_plan_is_that_of_the_way_the_entry_asks_for(tmp_path: Path):
    target = PlannedTarget(tmp_path, entry={"streaming": {}})
    plan = target.plan()
    save_plan(target.artifacts.root, plan)
    saved = load_plan(target.artifacts.root, "one")
    assert saved is not None
    assert [each.seconds for each in saved.steps] == [each.seconds for each in plan.ways["streamed"].steps]


def test_only_results_that_are_newer_than_the_plan_are_compared(tmp_path: Path):
    target = PlannedTarget(tmp_path)
    target.publish("eagle3_export", {"draft": "a", "settings": {}}, "before")
    save_plan(target.artifacts.root, target.plan())
    saved = load_plan(target.artifacts.root, "one")
    assert saved is not None
    assert {each.seconds for each in compare_plan(saved, target.subject)} == {None}
    made = target.publish("eagle3_export", {"draft": "b", "settings": {}}, "after")
    target.publish("eagle3_export", {"draft": "c", "settings": {}}, "later still")
    found = {each.step.asset: each for each in compare_plan(saved, target.subject)}
    assert found["eagle3_export"].seconds == made.seconds
    assert found["eagle3_export"].ratio == made.seconds / found["eagle3_export"].step.seconds.value
    assert found["eagle3_draft"].ratio is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b'{"schema": 2}',
        b"\xff",
        {"steps": 3},
        {"steps": [{}]},
        {"made_at": "soon"},
        {"steps": [{"asset": "../../x"}]},
        {"seconds": {"low": 3, "value": 2, "high": 1}},
        {"source": {"kind": "guessed", "text": ""}},
    ],
    ids=lambda damage: repr(damage)[:30],
)
def test_a_damaged_plan_is_one_clear_error(tmp_path: Path, damage: bytes | dict):
    target = PlannedTarget(tmp_path)
    save_plan(target.artifacts.root, target.plan())
    path = locate_plan(target.artifacts.root, "one")
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        whole = json.loads(path.read_text())
        inside = whole["steps"][0] if damage.keys() & {"seconds", "source"} else whole
        inside |= damage
        path.write_text(json.dumps(whole))
    with pytest.raises(StoreError, match=r"plan\.json: "):
        load_plan(target.artifacts.root, "one")
    path.write_bytes(b"damaged")
    assert save_plan(target.artifacts.root, target.plan())  # the next run replaces it
