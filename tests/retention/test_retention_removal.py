"""A removal takes what may go at its moment, beside runs, and whenever it is killed."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from kill_points import killed_before
from retention_toys import keys_of, list_stored, make_features, make_place, make_result

from draftworks.retention.removable import RemovalPlan, plan_removal
from draftworks.retention.removal import remove_items
from draftworks.retention.stored_results import pin_result
from draftworks.retention.survey import survey
from draftworks.storage.artifacts import LOCK, ArtifactStore
from draftworks.storage.file_lock import hold_lock


def plan(var: Path) -> RemovalPlan:
    found = survey(make_place(var))
    return plan_removal(found.totals, found.candidates, {})


def prune(var: Path):
    return remove_items(plan(var), lambda: make_place(var))


@pytest.fixture
def var(tmp_path: Path) -> Path:
    """Two drafts and two sets of features, of which the second are current."""
    for step, tokens in enumerate(("old", "new")):
        make_features(tmp_path, [step, step + 1], tokens)
        make_result(tmp_path, "x_draft", tokens=tokens, target="a")
    return tmp_path


def test_what_nothing_refers_to_is_gone_and_what_is_in_use_reads_on(var: Path):
    current = ArtifactStore(var).load_current("x_draft", "a")
    done = prune(var)
    assert len(done.removed) == 3
    assert done.nbytes == sum(item.nbytes for item in done.removed)
    assert list_stored(var) == keys_of(1, 2)
    assert ArtifactStore(var).list_all("x_draft", "a") == [current]
    assert current.find_damage() is None
    assert plan(var).items == ()
    assert prune(var).removed == ()


def test_a_target_whose_run_makes_something_is_left_alone(var: Path):
    with hold_lock(var / "training_features" / "a" / LOCK, "busy"):
        done = prune(var)
    assert not done.removed
    assert set(done.left.values()) == {"a run of target a makes training_features"}
    assert list_stored(var) == keys_of(0, 1, 2)
    assert prune(var).removed


def test_the_registry_is_read_as_often_for_many_targets_as_for_one(tmp_path: Path):
    names = [f"t{number}" for number in range(4)]
    for name in names:
        for lr in range(2):
            make_result(tmp_path, "x_draft", target=name, lr=lr)
    looked = []

    def look_again():
        looked.append(1)
        return make_place(tmp_path, targets=names)

    found = survey(make_place(tmp_path, targets=names))
    done = remove_items(plan_removal(found.totals, found.candidates, {}), look_again)
    assert {item.owner for item in done.removed} == set(names)
    assert len(looked) == 2  # before the locks are taken, and once they are held


def test_a_target_with_a_queued_run_is_left_alone(var: Path):
    done = remove_items(plan(var), lambda: make_place(var), busy={"a"})
    assert not done.removed
    assert set(done.left.values()) == {"a run of target a is queued or works"}


def test_what_was_pinned_or_became_current_since_the_plan_is_left(var: Path):
    before = plan(var)
    first, second = sorted(ArtifactStore(var).list_all("x_draft", "a"), key=lambda each: each.created)
    pin_result(ArtifactStore(var), "x_draft", "a", first.path.name, "")
    make_features(var, [0, 1], "old")
    done = remove_items(before, lambda: make_place(var))
    assert not done.removed
    assert set(done.left.values()) == {"it is in use now"}
    assert first.find_damage() is second.find_damage() is None
    assert list_stored(var) == keys_of(0, 1, 2)


def test_locks_are_free_afterwards(var: Path):
    prune(var)
    make_result(var, "x_draft", tokens="newer", target="a")


def test_a_removal_killed_at_any_moment_leaves_whole_results_and_the_next_one_ends_it(tmp_path: Path):
    for step in count():
        folder = tmp_path / str(step)
        old, new = make_result(folder, "x_draft", lr=1), make_result(folder, "x_draft", lr=2)
        planned = plan(folder)
        killed = killed_before(step, lambda at=folder, of=planned: remove_items(of, lambda: make_place(at)))
        for each in ArtifactStore(folder).list_all("x_draft", "a"):
            assert each.find_damage() is None
        prune(folder)
        assert not old.path.exists()
        assert {path.name for path in old.path.parent.iterdir()} == {LOCK, "current.json", new.path.name}
        if not killed:
            return
