"""What is in use: the roots and all that they were made from.
Which of what may go goes, down to a budget.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.retention.removable import Item, plan_removal
from draftworks.retention.stored_results import StoredResult
from draftworks.retention.survey import find_best, find_used


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
