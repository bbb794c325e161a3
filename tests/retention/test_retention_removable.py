"""Which of what may go goes, down to a budget."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from draftworks.retention.removable import Item, plan_removal

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
