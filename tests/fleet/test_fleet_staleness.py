"""Reports and drafts are stale against what has changed since, and only that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from measured_fleet import MeasuredFleet, may, walk

from draftworks.config.strategies import resolve_strategy
from draftworks.fleet import leaderboard as views
from draftworks.fleet.leaderboard import Fleet
from draftworks.storage.artifacts import BuildResult
from draftworks.targets.registry import HELDOUT
from draftworks.targets.resolve import resolve_target
from draftworks.targets.training_data import identify_eval_data

NAME = "one"


@pytest.fixture
def measured(tmp_path: Path) -> MeasuredFleet:
    measured = MeasuredFleet(tmp_path)
    measured.add_measured(NAME, walk(1.0))
    return measured


def test_a_report_of_what_is_there_is_not_stale(measured: MeasuredFleet):
    assert measured.standing(NAME).stale_against == ()


def test_a_draft_of_equal_weights_made_in_another_way_needs_a_report_of_its_own(measured: MeasuredFleet):
    """Options may differ that change what servers do with the same weights."""
    measured.publish("eagle3_draft", NAME, "first draft", {"options": {"ttt_length": 5}})
    assert measured.standing(NAME).stale_against == ("eagle3 draft",)
    measured.publish_report(NAME, walk(1.0), day=2)
    assert measured.standing(NAME).stale_against == ()


@pytest.mark.parametrize(
    ("file", "words"),
    [("model.safetensors", "weights of the target"), ("tokenizer.json", "tokenizer or chat template")],
)
def test_a_replaced_file_of_the_target_makes_its_reports_stale(measured: MeasuredFleet, file: str, words: str):
    (measured.model(NAME) / file).write_text("of another one altogether")
    assert words in measured.standing(NAME).stale_against


class TrainedFleet(MeasuredFleet):
    """One target with data, a draft trained on them, and a report."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.data.parent.mkdir(parents=True)
        self.data.write_text('{"messages": []}\n')
        (self.registry.root / "datasets").mkdir()
        (self.registry.root / "datasets" / "none.yaml").write_text("files: [data/*.jsonl]\n")
        self.add_measured(NAME, walk(1.0))
        self.edit(strategies={"eagle3": {}})
        self.prepare()
        self.train()

    @property
    def data(self) -> Path:
        return self.registry.root / "data" / "a.jsonl"

    def edit(self, **entry) -> None:
        path = self.target_file(NAME)
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **entry}))

    def prepare(self, tokens: str = "tokens") -> None:
        fleet, target = Fleet.of(self.registry), self.registry.load_target(NAME)
        files = resolve_target(target, fleet.registry, fleet.digests)
        made_from = identify_eval_data(HELDOUT, target, files.vocab_size, fleet.registry, fleet.digests)
        self.publish("conversations", NAME, "c", made_from.to_json())
        answers = {
            "responses": target.responses.to_identity(),
            "max_length": target.max_length,
            "only_last_turn": False,
        }
        self.publish("responses", NAME, tokens, {**self._digests(NAME), **answers})
        self.publish("tokenized_train", NAME, tokens, {"responses": tokens})

    def train(
        self, version: str = "second draft", summary: dict | None = None, start_from: str | None = None, **training
    ) -> None:
        entry, strategy = self.registry.load_target(NAME).strategies["eagle3"], resolve_strategy("eagle3")
        identity = {
            "strategy": "eagle3",
            "options": strategy.parse_options(entry.options, where="").to_identity(),
            "training": {**entry.training.to_identity(), **training},
            "start_from": start_from,
            "target": self._digests(NAME)["target"],
            "tokens": self.artifacts.load_current("tokenized_train", NAME).data_version,
            "version": version,
        }
        self.artifacts.obtain("eagle3_draft", NAME, identity, lambda out: BuildResult(version, summary or {}))
        self.publish_report(NAME, walk(1.0))

    def replace_weights(self) -> None:
        (self.model(NAME) / "model.safetensors").write_text("of another model altogether")

    def evaluate_again(self) -> None:
        made_from = self._digests(NAME)
        self.publish("heldout_responses", NAME, "answers", made_from)
        self.publish("heldout_eval_features", NAME, "features", made_from)
        self.publish_report(NAME, walk(0.5), day=2)

    @property
    def changes(self) -> tuple[str, ...]:
        return self.standing(NAME).draft_changes


@pytest.fixture
def fleet(tmp_path: Path) -> TrainedFleet:
    return TrainedFleet(tmp_path)


def test_a_draft_of_what_is_there_is_not_stale(fleet):
    assert fleet.changes == ()


def test_a_report_of_new_weights_makes_the_numbers_new_and_not_the_draft(fleet):
    fleet.replace_weights()
    assert fleet.standing(NAME).stale_against == ("weights of the target",)
    fleet.evaluate_again()
    found = fleet.standing(NAME)
    assert found.stale_against == ()
    assert found.draft_changes[0].startswith("weights of the target (since ")
    fleet.prepare()
    fleet.train("third draft")
    assert fleet.changes == ()


def test_a_tune_that_a_run_asked_for_is_not_stale_and_one_of_the_registry_is(fleet):
    fleet.train("tuned", summary={"overrides": {"start_from": "0123"}}, start_from="weights of the first")
    assert fleet.changes == ()
    fleet.train("tuned by nobody", start_from="weights of the first")
    assert fleet.changes[0].startswith("recipe: start_from")


def test_new_data_count_before_and_after_they_are_prepared(fleet):
    fleet.data.write_text('{"messages": [1]}\n')
    os.utime(fleet.data, (may(9).timestamp() + 10**8,) * 2)
    assert fleet.changes == ("training data (since 2029-07-09)",)
    fleet.prepare("more tokens")
    fleet.publish_report(NAME, walk(0.9), day=3)
    assert [change.partition(" (")[0] for change in fleet.changes] == ["training data"]
    fleet.train("third draft")
    assert fleet.changes == ()


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"strategies": {"eagle3": {"options": {"ttt_length": 3}}}}, "options.ttt_length 7 → 3"),
        ({"strategies": {"eagle3": {"training": {"epochs": 9}}}}, "training.epochs 1 → 9"),
        ({"max_length": 17}, "max_length 2048 → 17"),
        ({"data": {"held_out_share": 0.25}}, "data.held_out_share 0.1 → 0.25"),
        ({"responses": {"max_new_tokens": 5}}, "responses.max_new_tokens 512 → 5"),
    ],
)
def test_a_changed_recipe_is_named_setting_by_setting(fleet, entry, named):
    fleet.edit(**entry)
    assert [change.partition(" (")[0] for change in fleet.changes] == [f"recipe: {named}"]


def test_how_ranks_cut_the_work_is_no_change(fleet):
    fleet.edit(strategies={"eagle3": {"training": {"processes": 2, "micro_batch_size": 1}}})
    assert fleet.changes == ()


def test_what_one_run_asked_for_is_no_change_of_the_registry(fleet):
    fleet.train("third draft", {"overrides": {"training": {"epochs": 3}}}, epochs=3)
    assert fleet.changes == ()
    fleet.train("fourth draft", {}, epochs=3)
    assert "recipe: training.epochs 3 → 1" in fleet.changes[0]


def test_what_a_record_does_not_say_is_not_known(fleet):
    fleet.publish("eagle3_draft", NAME, "of an early version", {})
    assert [change.partition(",")[0] for change in fleet.changes] == [
        "weights of the target: not known",
        "training data: not known",
    ]


def test_data_that_are_gone_are_not_known_and_the_row_stays(fleet):
    fleet.data.unlink()
    found = fleet.standing(NAME)
    assert found.value == 1.0
    assert "training data: not known" in found.draft_changes[0]


def test_people_see_which_of_the_two_is_stale(fleet):
    fleet.replace_weights()
    shown = views.cells(fleet.standing(NAME), may(3).timestamp())["stale against"]
    assert shown == "numbers: weights of the target; draft: weights of the target"
    table = views.frame([fleet.standing(NAME)], may(3).timestamp())
    assert list(table["draft_changes"]) == ["weights of the target"]
