"""Logged requests as one more thing that is decided about, where the entry asks for it, and by the same margins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decision_site import DecisionSite
from request_logs import make_traffic, write_log

from draftworks.decision.deciding import describe_decision, plot_decision
from draftworks.decision.record import Choice, Decision, Reference, save_decision
from draftworks.decision.request_loss import SERVED_REQUESTS
from draftworks.production.requests import ServedRequest


def make_site(folder: Path, **requests: Any) -> DecisionSite:
    logs = {"files": ["logs/*.jsonl"], "decide": True, **requests}
    site = DecisionSite(folder, entry={"decision": {}, "observation": {"requests": logs}})
    digest = site.complete(site.publish_draft("a"), 2.0)
    site.promote(digest, force=True, why="as told")
    return site


@pytest.fixture
def site(tmp_path: Path) -> DecisionSite:
    return make_site(tmp_path)


def log(site: DecisionSite, traffic: Iterable[ServedRequest], draft: str | None = None) -> Decision:
    """The decision after a log of requests to the draft in service."""
    draft = site.open().register.require().draft.digest if draft is None else draft
    write_log(site.registry / "logs" / "a.jsonl", (replace(each, draft=draft) for each in traffic))
    return site.decide()


@pytest.mark.parametrize(
    ("later", "choice"), [(0.5, Choice.KEEP), (0.465, Choice.TUNE), (0.3, Choice.RETRAIN)], ids=["same", "bit", "lot"]
)
def test_what_requests_lost_is_decided_by_the_margins(site: DecisionSite, later: float, choice: Choice):
    decision = log(site, make_traffic({"chat": (0.5, later), "docs": (0.5, later)}, each=100))
    found = decision.figures[-1]
    assert (decision.choice, found.choice, found.reference) == (choice, choice, Reference.FIRST_HOURS)
    assert found.loss is not None
    assert abs(found.loss - 3 * (0.5 - later)) < 0.03
    assert (decision.figures[0].eval_set, decision.figures[0].choice) == ("heldout", Choice.KEEP)
    assert plot_decision(decision)


def test_the_reason_names_the_slices_that_fell_and_the_record_is_read_back(site: DecisionSite):
    decision = log(site, make_traffic({"chat": (0.5, 0.5), "tutor": (0.6, 0.3)}))
    assert "; fell: source tutor" in describe_decision(decision)
    assert "since the draft's first hours in service" in describe_decision(decision)
    saved = save_decision(site.artifacts.root, decision)
    assert Decision.from_json(saved.to_json(), "here") == saved


def test_more_requests_of_the_same_kind_are_the_same_decision(site: DecisionSite):
    traffic = make_traffic({"chat": (0.5, 0.5), "tutor": (0.6, 0.3)})
    subjects = [log(site, traffic[:-cut]).subject for cut in (200, 1)]
    assert subjects[0] == subjects[1]
    assert log(site, make_traffic({"chat": (0.5, 0.3), "tutor": (0.6, 0.6)})).subject != subjects[0]


def test_without_figures_nothing_is_lost(site: DecisionSite):
    for traffic, draft, reason in (
        ([], None, "no request of the draft in service"),
        (make_traffic({"chat": (0.5, 0.1)}), "another", "no request of the draft in service"),
        (make_traffic({"chat": (0.5, 0.1)}, hours=20), None, "first hours of the draft in service are not over"),
        (make_traffic({"chat": (0.5, 0.1)}, hours=30, each=1), None, "too few requests"),
    ):
        decision = log(site, traffic, draft)
        found = decision.figures[-1]
        assert (decision.choice, found.eval_set, found.choice) == (Choice.KEEP, SERVED_REQUESTS, Choice.KEEP)
        assert reason in found.reason


def test_where_the_entry_does_not_ask_for_it_a_decision_is_as_before(tmp_path: Path):
    site = make_site(tmp_path, decide=False)
    decision = log(site, make_traffic({"chat": (0.5, 0.1)}))
    assert [each.eval_set for each in decision.figures] == ["heldout"]
