"""Decisions over published results: what the draft in service is compared with, tunes, and what cannot be decided."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from decision_site import HOUR, DecisionSite

from draftworks.decision.deciding import Decider, describe_decision, plot_decision
from draftworks.decision.figures import NotMeasuredError
from draftworks.decision.record import Choice, Decision, Reference, save_decision
from draftworks.errors import ConfigError, DraftworksError, StoreError

KEEP, TUNE, RETRAIN, UNDECIDED = Choice.KEEP, Choice.TUNE, Choice.RETRAIN, Choice.UNDECIDED
SAME, BOTH, FORMER = Reference.SAME_PROMPTS, Reference.BOTH_DRAFTS, Reference.FORMER_FIGURE


@pytest.fixture
def site(tmp_path: Path) -> DecisionSite:
    return DecisionSite(tmp_path)


@pytest.fixture
def served(site: DecisionSite) -> DecisionSite:
    """Draft `a`, which accepts 2 tokens per pass, is in service."""
    put(site, "a", 2.0)
    return site


def test_nothing_is_decided_once_the_data_set_or_the_held_out_share_has_changed(served: DecisionSite):
    (served.registry / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    (served.registry / "chats.jsonl").write_text("{}\n")
    edit(served, dataset="chats")
    served.publish_conversations()
    assert served.decide().choice is KEEP
    edit(served, data={"held_out_share": 0.3})
    with pytest.raises(NotMeasuredError, match="data of eval set heldout.*draftworks run evaluate --target small"):
        served.decide()
    served.publish_conversations()
    assert served.decide().choice is KEEP
    (served.registry / "chats.jsonl").write_text("{}\n{}\n")
    with pytest.raises(NotMeasuredError, match="data of eval set heldout"):
        served.decide()


def put(site: DecisionSite, name: str, accepted: float, answers: str = "first", **identity: object) -> str:
    """Publish a draft and put it into service."""
    digest = site.complete(site.publish_draft(name, **identity), accepted, answers)
    site.promote(force=True, why="as told")
    return digest


def change_target(site: DecisionSite, accepted: float, weights: str = "second", answers: str = "answered anew") -> None:
    """The target gets other weights; the draft in service is measured on its fresh answers."""
    site.add_target("small", weights)
    site.measure(site.load_draft(site.open().register.require().draft.digest), accepted, answers)


def edit(site: DecisionSite, **keys: object) -> None:
    """Change the target's entry, and nothing else."""
    path = site.registry / "targets" / "small.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **keys}))


def read(decision: Decision) -> tuple[Choice, Reference, float | None]:
    found = decision.figures[0]
    return decision.choice, found.reference, None if found.loss is None else round(found.loss, 9)


def test_a_draft_on_what_it_was_put_into_service_with_has_lost_nothing(served: DecisionSite):
    decision = served.decide()
    assert read(decision) == (KEEP, SAME, 0.0)
    assert (decision.figures[0].low, decision.figures[0].high, decision.figures[0].prompts) == (0.0, 0.0, 120)


@pytest.mark.parametrize(("now", "choice"), [(2.5, KEEP), (1.96, KEEP), (1.9, TUNE), (1.7, RETRAIN)])
def test_after_a_change_of_the_target_the_former_figure_is_the_reference(
    served: DecisionSite, now: float, choice: Choice
):
    change_target(served, now)
    decision = served.decide()
    assert read(decision) == (choice, FORMER, round(2.0 - now, 9))
    assert (decision.figures[0].value, decision.figures[0].reference_value) == (now, 2.0)
    assert decision.target_digest == served.open().files.digest


def test_answers_that_no_change_of_the_target_touches_are_compared_prompt_by_prompt(served: DecisionSite):
    change_target(served, 1.9, answers="first")
    assert read(served.decide()) == (TUNE, SAME, 0.1)


def test_after_a_change_of_the_eval_data_a_tune_is_compared_on_the_new_data_with_what_it_was_tuned_from(
    served: DecisionSite,
):
    first = served.load_draft(served.open().register.require().draft.digest)
    served.measure(first, 1.9, "others")
    assert read(served.decide()) == (TUNE, FORMER, 0.1)
    tuned = served.complete(served.tune("b"), 2.1, "others")
    served.promote()
    decision = served.decide()
    assert read(decision) == (KEEP, BOTH, -0.2)
    assert (decision.draft, decision.figures[0].reference_draft) == (tuned, first.path.name)


def test_a_tune_that_repaired_the_loss_is_kept_and_one_that_did_not_is_followed_by_a_training(served: DecisionSite):
    first = served.open().register.require().draft.digest
    change_target(served, 1.9)
    tuned = served.complete(served.tune("b"), 1.98, "answered anew")
    served.promote()
    decision = served.decide()
    assert read(decision) == (KEEP, FORMER, 0.02)
    assert (decision.figures[0].reference_draft, decision.after_tune) == (first, None)
    again = served.complete(served.tune("c", served.load_draft(first)), 1.9, "answered anew")
    served.promote(force=True, why="for a test")
    decision = served.decide()
    assert (*read(decision), decision.after_tune) == (RETRAIN, FORMER, 0.1, again)
    assert "did not help" in describe_decision(decision)
    assert tuned != again
    put(served, "d", 1.9, "answered anew")  # trained from the start: it is measured by its own figures
    assert read(served.decide()) == (KEEP, SAME, 0.0)


def test_a_tune_for_an_earlier_change_is_measured_by_its_own_figures(served: DecisionSite):
    change_target(served, 1.9)
    tuned = served.complete(served.tune("b"), 1.92, "answered anew")
    served.promote()
    assert served.decide().choice is RETRAIN
    change_target(served, 1.82, "third", "fresher")
    decision = served.decide()
    assert read(decision) == (TUNE, FORMER, 0.1)
    assert decision.figures[0].reference_draft == tuned


def test_tunes_of_tunes_for_one_change_are_measured_by_what_the_first_began_with(served: DecisionSite):
    first = served.open().register.require().draft.digest
    change_target(served, 1.9)
    for name, accepted in (("b", 1.91), ("c", 1.92)):
        served.complete(served.tune(name), accepted, "answered anew")
        served.promote()
    decision = served.decide()
    assert read(decision) == (RETRAIN, FORMER, 0.08)
    assert decision.figures[0].reference_draft == first


def test_a_tune_that_the_rule_of_promotion_refuses_did_not_help(served: DecisionSite):
    served.measure(served.load_draft(served.open().register.require().draft.digest), 1.9, "others")
    assert served.decide().choice is TUNE
    tune = served.tune("b")
    assert served.decide().choice is TUNE  # not measured
    served.measure(tune, 1.8, "others")
    assert served.decide().choice is TUNE  # not exported: nothing is said of it yet
    served.publish_export(tune)
    decision = served.decide()
    assert (*read(decision), decision.after_tune) == (RETRAIN, FORMER, 0.1, tune.path.name)
    better = served.tune("c")
    served.complete(better, 2.0, "others")
    assert served.decide().after_tune == tune.path.name  # the other one is accepted and waits


def test_a_tune_that_was_taken_back_did_not_help(served: DecisionSite):
    served.measure(served.load_draft(served.open().register.require().draft.digest), 1.9, "others")
    tune = served.complete(served.tune("b"), 2.1, "others")
    served.promote()
    served.rollback()
    decision = served.decide()
    assert (decision.choice, decision.after_tune) == (RETRAIN, tune)


def test_a_training_for_other_weights_from_the_same_draft_is_no_tune_for_this_change(served: DecisionSite):
    first = served.load_draft(served.open().register.require().draft.digest)
    served.complete(served.tune("b"), 1.0)  # refused, for the weights of before
    change_target(served, 1.9)
    decision = served.decide()
    assert (decision.choice, decision.after_tune, decision.draft) == (TUNE, None, first.path.name)


def test_the_most_urgent_eval_set_counts_and_a_new_one_has_nothing_to_lose(tmp_path: Path):
    site = DecisionSite(tmp_path, evals=("code",))
    put(site, "a", 2.0)
    site.add_target("small", "second")
    draft = site.load_draft(site.open().register.require().draft.digest)
    site.measure(draft, {"heldout": 2.0, "code": 1.7}, "answered anew")
    decision = site.decide()
    assert (decision.choice, [one.choice for one in decision.figures]) == (RETRAIN, [KEEP, RETRAIN])
    (site.registry / "evals" / "law.yaml").write_text("dataset: none\n")
    edit(site, evals=["code", "law"])
    site.measure(draft, {"heldout": 2.0, "code": 2.0, "law": 0.5}, "answered anew")
    decision = site.decide()
    assert [(one.eval_set, one.choice) for one in decision.figures] == [
        ("heldout", KEEP),
        ("code", KEEP),
        ("law", KEEP),
    ]
    assert "law: keep: nothing was measured on it" in describe_decision(decision)
    assert decision.choice is KEEP


def test_wide_intervals_and_few_prompts_are_undecided_with_the_number_that_would_decide(tmp_path: Path):
    site = DecisionSite(tmp_path, spread=0.3)
    put(site, "a", 2.0)
    change_target(site, 1.9)
    found = site.decide().figures[0]
    assert found.choice is UNDECIDED
    assert found.low is not None
    assert found.low < 0.05
    site.measure(site.load_draft(site.decide().draft), 1.0, "answered anew", prompts=5)
    found = site.decide().figures[0]
    assert (found.choice, found.prompts, found.needed) == (UNDECIDED, 5, 120)


@pytest.mark.usefixtures("pictures")
def test_what_cannot_be_compared_is_undecided_and_says_why(served: DecisionSite):
    change_target(served, 1.0)
    draft = served.load_draft(served.decide().draft)
    replace(served, draft_tokens=7).measure(draft, 1.1, "answered anew")
    decision = served.decide()
    assert read(decision) == (UNDECIDED, Reference.NONE, None)
    assert "7 tokens per pass are proposed now, 5 were" in decision.reasons[0]
    assert plot_decision(decision).startswith(b"\x89PNG")
    record = served.open().register.require()
    shutil.rmtree(served.artifacts.root / "eagle3_report" / "small" / record.draft.report)
    assert "is not there any more" in served.decide().reasons[0]


def test_equal_facts_are_one_decision_and_other_facts_another(served: DecisionSite):
    change_target(served, 1.9)
    first = save_decision(served.artifacts.root, served.decide())
    assert served.decide().subject == first.subject
    assert save_decision(served.artifacts.root, served.decide()) == first
    edit(served, decision={"tune_margin": 0.01})
    subjects = {first.subject, served.decide().subject}
    served.complete(served.tune("b"), 1.9, "answered anew")
    served.promote()
    subjects.add(served.decide().subject)
    change_target(served, 1.9, "third", "fresher")
    subjects.add(served.decide().subject)
    assert len(subjects) == 4


def test_costs_are_those_of_the_newest_trainings_of_each_kind(served: DecisionSite):
    assert served.decide().costs.tune is None
    assert "a tune not known yet" in describe_decision(served.decide())
    served.tune("b", summary=HOUR)
    served.publish_draft("c", summary={"seconds": 18000.0, "world_size": 1})
    served.publish_draft("d", summary={"seconds": 0.0, "world_size": 1})  # published as it was
    costs = served.decide().costs
    assert (costs.tune, costs.retrain) == (2.0, 5.0)


def refuse(site: DecisionSite, match: str, error: type[DraftworksError]) -> None:
    with pytest.raises(error, match=match):
        site.decide()
    assert not (site.artifacts.root / "decisions").exists()


def test_without_a_draft_in_service_or_a_section_nothing_is_decided(site: DecisionSite):
    refuse(site, "has no eagle3 draft in service: run draftworks promote small eagle3", StoreError)
    put(site, "a", 2.0)
    edit(site, decision=None)
    refuse(site, "target small: has no section `decision`", ConfigError)
    other = replace(site, strategy="dflash", entry={"decision": {}})
    with pytest.raises(ConfigError, match="does not use 'dflash'; there is: eagle3"):
        Decider.of(other.open())


def test_a_draft_that_is_not_measured_on_what_is_there_now_is_said_with_what_to_do(served: DecisionSite):
    served.add_target("small", "second")
    refuse(
        served, "features of eval set heldout are of the weights .* Run it: draftworks run evaluate", NotMeasuredError
    )
    change_target(served, 1.9)
    edit(served, evals=["code"])
    (served.registry / "evals" / "code.yaml").write_text("dataset: none\n")
    refuse(served, "eval set code are of the weights None", NotMeasuredError)
    edit(served, evals=[])
    served.measure(served.publish_draft("b"), 1.9, "fresher")
    refuse(served, "not about eval set heldout as it is now. Run it: draftworks run evaluate", NotMeasuredError)
    for report in (served.artifacts.root / "eagle3_report" / "small").glob("*/"):
        shutil.rmtree(report)
    refuse(served, "expected a report of it, found none", NotMeasuredError)


def test_a_record_of_a_draft_of_another_target_digest_is_refused(served: DecisionSite):
    file = served.open().register.folder / "in_service.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_digest": "0123456789abcdef"}))
    refuse(served, "record says that it was trained for the weights 0123456789abcdef, the draft itself for", StoreError)


def test_margins_that_contradict_each_other_are_refused_with_the_entry(served: DecisionSite):
    edit(served, decision={"tune_margin": 0.2, "retrain_margin": 0.1})
    refuse(served, r"tune_margin 0\.2 contradicts retrain_margin 0\.1", ConfigError)
