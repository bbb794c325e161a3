"""Served prompts in the graph: what is refused before anything is made, and what a report says of weights."""

from __future__ import annotations

import pytest
from served_toys import SECRETS, body, write_log
from service_site import ServiceSite
from sliced_site import publish_sliced_report, publish_weighted_draft

from draftworks.config.strategies import resolve_strategy
from draftworks.data.slices import SlicePlan, SliceWeight
from resources.workspace import Workspace
from spec_assets.reports import describe_weighted_slices

SERVED = """
files: ["../logs/*.log"]
format: served
served: {mask: [email]}
"""


def with_served_prompts(site, prompts: int = 40):
    """The site with logged requests in its mix, the held-out part of them as an eval set."""
    rows = [body(f"What is the function number {n} for?", f"and {n + 1}?") for n in range(prompts)]
    write_log(site.root / "logs" / "a.log", [*rows, body(f"why is {SECRETS['github_token']} refused?")])
    (site.registry / "datasets" / "served.yaml").write_text(SERVED)
    (site.registry / "evals").mkdir(exist_ok=True)
    (site.registry / "evals" / "served.yaml").write_text("dataset: served\npart: held_out\n")
    site.target_file.write_text(site.target_file.read_text() + "mix: {datasets: [served]}\nevals: [served]\n")
    return site


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("mix: {datasets: [served]}", "mix: {datasets: [served], weights: none.json}"), "set data.max_conversations"),
        (("mix: {datasets: [served]}", "mix: {datasets: [chats]}"), "chats is the target's dataset already"),
        (("responses: {", "responses: {mode: passthrough, "), "set responses.mode to regenerate"),
        (("held_out_share: 0.2", "max_conversations: 9, held_out_share: 0.2"), None),
    ],
    ids=["weights without a choice", "named twice", "no answers", "no plan"],
)
def test_bad_mixes_are_one_clear_error_before_anything_is_made(site, change, match):
    with_served_prompts(site)
    text = site.target_file.read_text().replace(*change)
    if match is None:
        text, match = (
            text.replace("[served]}", "[served], weights: none.json}"),
            "none.json. Write it with: draftworks slices small",
        )
    site.target_file.write_text(text)
    result = site.run("prepare")
    messages = "".join(e.event_specific_data.error.to_string() for e in result.all_events if e.is_step_failure)
    assert match in messages
    assert not list(site.var.glob("conversations/*/*"))


def test_an_eval_set_that_is_trained_on_is_refused(site):
    with_served_prompts(site)
    (site.registry / "evals" / "served.yaml").write_text("dataset: served\n")
    result = site.run("prepare")
    messages = "".join(e.event_specific_data.error.to_string() for e in result.all_events if e.is_step_failure)
    assert "eval set served: drafts are trained on its data set served: set part to held_out" in messages


def test_the_report_of_a_draft_says_whether_the_weights_of_its_data_have_helped(tmp_path):
    site = ServiceSite(tmp_path, entry={"mix": {"datasets": []}})
    workspace, strategy = Workspace(registry_root=str(site.registry)), resolve_strategy("eagle3")
    before = publish_sliced_report(site, site.publish_draft("a"), {"en": 2.0, "de": 1.5})
    assert describe_weighted_slices(workspace, strategy, before) == {}
    weight = SliceWeight("language", "de", 3.0, 2.0, 1.5)
    plan = SlicePlan("small", "eagle3", "heldout", before.path.name, "promoted", 3.0, (weight,))
    after = publish_sliced_report(site, publish_weighted_draft(site, "b", plan), {"en": 2.0, "de": 1.9})
    found = describe_weighted_slices(workspace, strategy, after)["weighted_slices"].value
    assert "Of 1 slice that this draft's data was weighted towards: 1 helped." in found
    assert "+0.40" in found
    gone = SlicePlan("small", "eagle3", "heldout", "removed", "promoted", 3.0, (weight,))
    other = publish_sliced_report(site, publish_weighted_draft(site, "c", gone), {"en": 2.0, "de": 1.8})
    found = describe_weighted_slices(workspace, strategy, other)["weighted_slices"].value
    assert found.startswith("Not compared: the report removed")
