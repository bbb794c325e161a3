"""Two drafts are compared on the prompts of both: only what differs is listed, and only what compares is subtracted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from report_folders import TARGET, ReportFolders

from draftworks.errors import ConfigError, StoreError
from draftworks.fleet.compared_drafts import ComparedDraft, find_compared_draft
from draftworks.fleet.comparison_page import render_markdown
from draftworks.fleet.draft_comparison import MISSING, DraftComparison, Kind, Verdict, compare_drafts
from draftworks.storage.artifacts import Artifact, BuildResult

SAMPLES = {f"s{index:02}": [index, *range(index + 3)] for index in range(16)}
LOW = {name: [1, 0, 1] for name in SAMPLES}
HIGH = {name: [3, 2, 3] for name in SAMPLES}
MIXED = {name: [2, 1, 2] if index % 2 else [0, 0, 0] for index, name in enumerate(SAMPLES)}


@dataclass(frozen=True)
class Drafts(ReportFolders):
    """Drafts of the target `small` with one report each."""

    def publish_draft(self, name: str, weights: str | None = "weights", **identity: Any) -> Artifact:
        made_from = {"strategy": "eagle3", "target": weights, "tokens": "tokens", "options": {}, **identity}
        summary = {"steps": 10, "tokens": 1000, "seconds": 7200.0, "world_size": 4}
        return self.artifacts.obtain(
            "eagle3_draft", TARGET, {**made_from, "name": name}, lambda out: BuildResult(name, summary)
        )

    def publish_input(self, asset: str, version: str, identity: dict[str, Any], **summary: Any) -> None:
        self.artifacts.obtain(asset, TARGET, identity, lambda out: BuildResult(version, summary))

    def publish(self, name: str, accepted: Mapping[str, list[int]], answers: str, **identity: Any) -> Artifact:
        draft = self.publish_draft(name, **identity)
        self.publish_report(name, answers, accepted)
        return draft

    def find(self, text: str | Path) -> ComparedDraft:
        return find_compared_draft(str(text), self.artifacts)

    def compare(self, a: str | Path, b: str | Path) -> DraftComparison:
        return compare_drafts(self.find(a), self.find(b))


@pytest.fixture
def drafts(tmp_path: Path) -> Drafts:
    return Drafts(tmp_path)


@pytest.mark.parametrize(
    ("a", "b", "verdict"), [(HIGH, LOW, Verdict.A), (LOW, HIGH, Verdict.B), (LOW, MIXED, Verdict.UNCLEAR)]
)
def test_the_difference_is_that_of_the_shared_prompts(drafts: Drafts, a, b, verdict):
    answers = drafts.publish_answers(SAMPLES)
    first, second = drafts.publish("a", a, answers), drafts.publish("b", b, answers)
    [found] = drafts.compare(first.path.name, f"small/eagle3/{second.path.name}").figures
    difference = sum(map(sum, a.values())) / 48 - sum(map(sum, b.values())) / 48
    assert found.difference == pytest.approx(difference)
    assert (found.kind, found.shared, found.verdict) == (Kind.PAIRED, 16, verdict)
    assert found.interval is not None
    assert found.interval.low <= found.difference <= found.interval.high
    assert found.interval.confidence == 0.95


def test_exchanged_drafts_have_the_opposite_difference(drafts: Drafts):
    answers = drafts.publish_answers(SAMPLES)
    first, second = drafts.publish("a", HIGH, answers, options={"x": 1}), drafts.publish("b", MIXED, answers)
    there, back = drafts.compare(first.path.name, second.path.name), drafts.compare(second.path.name, first.path.name)
    [one], [other] = there.figures, back.figures
    assert one.difference == -other.difference
    assert (one.interval.low, one.interval.high) == pytest.approx((-other.interval.high, -other.interval.low))
    assert [each.low for each in one.slices] == pytest.approx([-each.high for each in other.slices])
    assert {(each.key, each.a, each.b) for each in there.recipe} == {(each.key, each.b, each.a) for each in back.recipe}


def test_places_in_the_text_are_compared_on_prompts_that_both_passed_there(drafts: Drafts):
    answers, some = drafts.publish_answers(SAMPLES), {name: [0, 1] for name in list(SAMPLES)[:6]}
    for name, late in (("a", some), ("b", {name: [3, 2] for name in SAMPLES}), ("c", {})):
        drafts.publish_draft(name)
        ranges = {0: HIGH, 256: late} if late else {0: HIGH}
        drafts.publish_report(name, answers, HIGH, by_position=ranges)
    a, b, c = (drafts.find(one.path.name) for one in map(drafts.publish_draft, "abc"))
    [found] = compare_drafts(a, b).figures
    shown = [
        (each.value, each.prompts, each.a, each.b, each.difference)
        for each in found.slices
        if each.column == "position"
    ]
    assert shown == [("0-255", 16, 8 / 3, 8 / 3, 0.0), ("256-511", 6, 0.5, 2.5, -2.0)]
    [alone] = compare_drafts(a, c).figures
    assert not [each for each in alone.slices if each.column == "position"]


def test_the_slices_of_a_column_partition_the_shared_prompts(drafts: Drafts):
    few = dict(list(SAMPLES.items())[:12])
    first = drafts.publish("a", HIGH, drafts.publish_answers(SAMPLES))
    second = drafts.publish("b", {name: LOW[name] for name in few}, drafts.publish_answers(few))
    [found] = drafts.compare(first.path.name, second.path.name).figures
    assert found.shared == sum(each.prompts for each in found.slices) == 12
    assert len(found.slices) > 1
    weighted = sum(each.prompts * each.difference for each in found.slices) / found.shared
    assert weighted == pytest.approx(found.difference)  # every prompt has as many passes


def test_a_prompt_that_was_answered_again_does_not_count(drafts: Drafts):
    changed = {name: [*ids, 9] if name < "s05" else ids for name, ids in SAMPLES.items()}
    first = drafts.publish("a", HIGH, drafts.publish_answers(SAMPLES))
    second = drafts.publish("b", LOW, drafts.publish_answers(changed))
    assert drafts.compare(first.path.name, second.path.name).figures[0].shared == 11


def test_drafts_without_a_common_prompt_are_said_to_be_unpaired(drafts: Drafts):
    others = {name: [*ids, 9] for name, ids in SAMPLES.items()}
    first = drafts.publish("a", HIGH, drafts.publish_answers(SAMPLES))
    second = drafts.publish("b", LOW, drafts.publish_answers(others))
    whole = drafts.compare(first.path.name, second.path.name)
    [found] = whole.figures
    assert (found.kind, found.shared, found.slices) == (Kind.UNPAIRED, 0, ())
    assert "unpaired" in found.describe()
    assert "Not on the same prompts" in whole.verdict


def test_nothing_is_subtracted_for_other_weights_without_a_common_prompt(drafts: Drafts):
    others = {name: [*ids, 9] for name, ids in SAMPLES.items()}
    first = drafts.publish("a", HIGH, drafts.publish_answers(SAMPLES))
    second = drafts.publish("b", LOW, drafts.publish_answers(others), weights="other")
    found = drafts.compare(first.path.name, second.path.name)
    assert found.figures[0].difference is None
    assert "other weights" in " ".join(found.notes)


def test_drafts_of_different_targets_stand_side_by_side(drafts: Drafts, tmp_path: Path):
    """Two stores, since the toy knows one target: the second is looked at through the folder of its report."""
    first = drafts.publish("a", HIGH, drafts.publish_answers(SAMPLES))
    other = Drafts(tmp_path / "other")
    other.publish_report("b", other.publish_answers(SAMPLES), LOW)
    for asset in ("eagle3_report", "heldout_responses"):
        shutil.move(other.var / asset / TARGET, other.var / asset / "large")
    for record in other.var.glob("*/large/*/artifact.json"):
        record.write_text(record.read_text().replace('"target": "small"', '"target": "large"'))
    [folder] = (other.var / "eagle3_report" / "large").glob("*/heldout/")
    found = drafts.compare(first.path.name, folder)
    assert [found.figures[0].difference, found.figures[0].verdict] == [None, Verdict.UNKNOWN]
    assert (found.figures[0].a.micro, found.figures[0].b.micro) == pytest.approx((8 / 3, 2 / 3))
    assert "different targets, small and large" in found.verdict


def test_other_numbers_of_proposed_tokens_do_not_compare(drafts: Drafts):
    answers = drafts.publish_answers(SAMPLES)
    first = drafts.publish("a", HIGH, answers)
    second = drafts.publish_draft("b")
    drafts.publish_report("b", answers, LOW, draft_tokens=5)
    [found] = drafts.compare(first.path.name, second.path.name).figures
    assert found.difference is None
    assert "3 tokens per pass were proposed by A, 5 by B" in found.reason


def test_only_keys_that_differ_are_listed_with_both_values(drafts: Drafts):
    same = {"seed": 1, "nested": {"x": [1, 2]}}
    first = drafts.publish_draft("a", options={**same, "block": 4}, training={"lr": 0.1, "steps": 5}, tokens="old")
    second = drafts.publish_draft("b", options={**same, "depth": 2}, training={"lr": 0.2, "steps": 5}, tokens="new")
    found = drafts.compare(first.path.name, second.path.name)
    assert {(each.key, each.a, each.b) for each in found.recipe} == {
        ("options.block", 4, MISSING),
        ("options.depth", MISSING, 2),
        ("training.lr", 0.1, 0.2),
    }
    assert [(each.key, each.a, each.b) for each in found.data] == [("tokens", "old", "new")]
    assert (found.costs[0].hours, found.costs[0].rank_hours, found.costs[0].parameters) == (2.0, 8.0, None)
    assert found.figures == ()
    assert "has no report yet" in " ".join(found.notes)
    assert "neither has a report" in render_markdown(found)


def test_data_is_followed_back_to_the_conversations(drafts: Drafts):
    """Two drafts of other answers to the same conversations: what differs are the answers' settings and figures."""
    made = {}
    for name, temperature, samples in (("a", 0.0, 10), ("b", 0.7, 12)):
        drafts.publish_input("conversations", "chats", {"data": {"held_out_share": 0.1}, "dataset": "files"})
        answered = {"conversations": "chats", "responses": {"temperature": temperature}, "max_length": 64}
        drafts.publish_input("responses", f"answers {name}", answered)
        drafts.publish_input("tokenized_train", f"tokens {name}", {"responses": f"answers {name}"}, samples=samples)
        made[name] = drafts.publish_draft(name, tokens=f"tokens {name}").path.name
    found = drafts.compare(made["a"], made["b"])
    assert [(each.key, each.a, each.b) for each in found.recipe] == [("answers: responses.temperature", 0.0, 0.7)]
    assert [(each.key, each.a, each.b) for each in found.data] == [
        ("tokens", "tokens a", "tokens b"),
        ("training set: samples", 10, 12),
    ]


def test_a_draft_equals_itself(drafts: Drafts):
    drafts.publish("a", MIXED, drafts.publish_answers(SAMPLES))
    found = drafts.compare("small/eagle3", "small/eagle3")
    assert (found.recipe, found.data) == ((), ())
    assert (found.figures[0].difference, found.figures[0].verdict) == (0.0, Verdict.UNCLEAR)


def test_reports_on_equal_eval_data_are_preferred_to_newer_ones(drafts: Drafts):
    old, more = drafts.publish_answers(SAMPLES), drafts.publish_answers({**SAMPLES, "t": [1, 2, 3]})
    first, second = drafts.publish("a", HIGH, old), drafts.publish("b", LOW, old)
    drafts.publish_report("b", more, {**LOW, "t": [1]})
    found = drafts.compare(first.path.name, second.path.name)
    assert found.figures[0].b.prompts == 16


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("copied", ["report", "eval set"])
def test_a_report_that_was_copied_elsewhere_can_be_compared(drafts: Drafts, tmp_path: Path, copied: str, named: bool):
    """Without its eval data, its prompts are known to be the same only where the report names their version."""
    answers = drafts.publish_answers(SAMPLES)
    first = drafts.publish("a", HIGH, answers, weights=None)
    report = drafts.publish_report("b", answers, LOW)
    source = report.path if copied == "report" else report.path / "heldout"
    shutil.copytree(source, tmp_path / "copy")
    [file] = (tmp_path / "copy").rglob("report.json")
    named_in = {"provenance": {"eval_tokens": answers} if named else {}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **named_in}))
    found = drafts.compare(first.path.name, tmp_path / "copy")
    assert found.b.draft is None
    assert found.figures[0].kind is (Kind.PAIRED if named else Kind.UNPAIRED)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("small/eagle3/ffff", "no draft is of that name; there are: small/eagle3/"),
        ("ffff", "there are: small/eagle3/"),
        ("large/eagle3", "target large has no eagle3 draft yet"),
        ("small/eagle3/a/b", "expected TARGET/STRATEGY"),
        ("../small", "expected TARGET/STRATEGY"),
        ("*", "expected TARGET/STRATEGY"),
        ("", "expected TARGET/STRATEGY"),
    ],
)
def test_a_name_without_a_draft_is_one_error_that_says_what_there_is(drafts: Drafts, text: str, message: str):
    drafts.publish_draft("a")
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        drafts.find(text)


def test_the_begin_of_a_digest_must_be_of_one_draft(drafts: Drafts):
    made = [drafts.publish_draft(str(number)).path.name for number in range(20)]
    first = next(name[0] for name in made if sum(other.startswith(name[0]) for other in made) > 1)
    with pytest.raises(ConfigError, match="several drafts are of that name"):
        drafts.find(first)
    assert drafts.find(made[0][:12]).draft.path.name == made[0]


def test_a_damaged_report_is_an_error_that_names_the_file(drafts: Drafts):
    first = drafts.publish("a", HIGH, drafts.publish_answers(SAMPLES))
    [report] = drafts.var.glob("eagle3_report/*/*/heldout/report.json")
    report.write_text("{")
    with pytest.raises(StoreError, match="report.json"):
        drafts.compare(first.path.name, first.path.name)
