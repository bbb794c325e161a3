"""What is in use: the roots and all that they were made from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
