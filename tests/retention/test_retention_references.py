"""What is in use: the roots and all that they were made from.
Which of what may go goes, down to a budget.
A removal takes what may go at its moment, beside runs, and whenever it is killed.
"""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kill_points import killed_before
from retention_toys import keys_of, list_stored, make_features, make_place, make_result

from draftworks.retention.removable import Item, RemovalPlan, plan_removal
from draftworks.retention.removal import remove_items
from draftworks.retention.stored_results import StoredResult, pin_result
from draftworks.retention.survey import find_best, find_used, survey
from draftworks.storage.artifacts import LOCK, ArtifactStore
from draftworks.storage.file_lock import hold_lock


def result(name: str, *mentions: str, target: str = "t", asset: str = "x_report", **more) -> StoredResult:
    values = {
        "names": frozenset({name, f"content-{name}"}),
        "made_from": (name, "none"),
        "weights": None,
        "created": 0.0,
        "seconds": 1.0,
        "bytes_per_s": None,
        "is_current": False,
        **more,
    }
    return StoredResult(asset, target, Path(asset, target, name), mentions=frozenset(mentions), **values)


@given(st.dictionaries(st.integers(0, 12), st.sets(st.integers(0, 12)), max_size=12), st.sets(st.integers(0, 12)))
def test_what_is_in_use_is_all_that_can_be_reached_from_a_root(edges: dict[int, set[int]], roots: set[int]):
    results = {each: result(str(each), *(f"content-{to}" for to in leads)) for each, leads in edges.items()}
    used = find_used(list(results.values()), {results[each].path: "current" for each in roots & edges.keys()})
    reached, waiting = set(), roots & edges.keys()
    while waiting:
        reached |= waiting
        waiting = {to for each in waiting for to in edges[each] if to in edges} - reached
    assert {int(each.digest) for each in results.values() if each in used} == reached


def test_the_same_content_of_another_target_is_not_in_use():
    user, own, other = result("1", "same"), result("2"), result("3", target="other")
    own, other = (
        result("2", names=frozenset({"same"})),
        result("3", target="other", names=frozenset({"same"})),
    )
    used = find_used([user, own, other], {user.path: "current"})
    assert used.reasons == {user.path: "current", own.path: "made into x_report 1"}


def test_a_draft_uses_the_features_of_its_tokens_and_target():
    draft = result("d", asset="x_draft", made_from=("tokens", "weights"))
    features = result("f", asset="training_features", made_from=("tokens", "weights"))
    others = [result(name, asset="training_features", made_from=(name, "weights")) for name in ("g", "h")]
    assert set(find_used([draft, features, *others], {draft.path: "current"}).reasons) == {draft.path, features.path}


def test_a_root_that_is_gone_is_no_result():
    assert find_used([], {Path("gone"): "pinned"}).reasons == {}


@pytest.mark.parametrize(
    ("scores", "best"), [((1.0, 3.0, 2.0), 1), ((2.0, 2.0, 1.0), 0), ((None, 1.0, None), 1), ((None, None, None), None)]
)
def test_of_several_reports_the_highest_score_is_the_best_and_of_equal_ones_the_earliest(scores, best):
    reports = [result(str(index), created=float(index)) for index in range(3)]
    found = find_best(reports, lambda report: scores[int(report.digest)])
    assert found == ({} if best is None else {reports[best].path: "best"})


ITEMS = st.lists(
    st.builds(
        Item,
        kind=st.sampled_from(["drafts", "features"]),
        owner=st.just("t"),
        name=st.uuids().map(str),
        path=st.just(Path()),
        nbytes=st.integers(0, 100),
        seconds=st.sampled_from([0.0, 1.0, 10.0, math.inf]),
        newest=st.floats(0, 100),
    ),
    max_size=12,
)


@given(ITEMS, st.integers(0, 200), st.dictionaries(st.sampled_from(["drafts", "features"]), st.integers(0, 400)))
def test_a_plan_keeps_to_its_budget_with_the_cheapest_items_and_no_more_of_them(items, in_use, budgets):
    totals = {kind: in_use + sum(item.nbytes for item in items if item.kind == kind) for kind in ("drafts", "features")}
    plan = plan_removal(totals, items, budgets)
    for use in plan.kinds:
        mine = [item for item in items if item.kind == use.kind]
        gone = [item for item in plan.items if item.kind == use.kind]
        kept = [item for item in mine if item not in gone]
        assert (use.total, use.removed) == (totals[use.kind], sum(item.nbytes for item in gone))
        assert use.removable == sum(item.nbytes for item in mine)
        if use.budget is None:
            assert not kept
            continue
        assert all(item.cost <= other.cost for item in gone for other in kept)
        left = use.total - use.removed
        assert left <= use.budget or not kept
        assert use.is_over == (left > use.budget)
        if gone:
            assert left + gone[-1].nbytes > use.budget


def test_what_frees_most_for_its_seconds_goes_first():
    def item(name: str, nbytes: int, seconds: float) -> Item:
        return Item("drafts", "t", name, Path(name), nbytes, seconds, 0.0)

    items = [item("small", 10, 10.0), item("large", 1000, 100.0), item("unknown", 1000, math.inf)]
    plan = plan_removal({"drafts": 2010}, items, {"drafts": 1000})
    assert [each.name for each in plan.items] == ["large", "small"]


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
