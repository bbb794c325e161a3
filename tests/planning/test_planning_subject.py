"""What a plan counts as there: results of the same files and settings, whichever conversations were chosen of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planning_toys import PlannedTarget

from draftworks.capture.answers.answer_sets import find_answers_file
from draftworks.capture.answers.answer_sets import make_answers_identity as identify_kept
from draftworks.capture.answers.record_file import RecordFile
from draftworks.config.run_files import RegenerateRun
from draftworks.data.conversations import Conversation, Turn, write_conversations
from draftworks.storage.artifacts import BuildResult
from draftworks.storage.records import FeaturesIdentity
from draftworks.targets.training_data import identify_conversations, make_answers_identity

ANSWERED = 90


def publish_features(target: PlannedTarget) -> None:
    """Publish what a run with 100 conversations makes before the training."""
    target.edit(data={"max_conversations": 100})
    target.digest_files()
    subject = target.subject
    spec, files, version = subject.target, subject.files, subject.find_data_version("heldout")
    assert files is not None
    prepared = identify_conversations(spec, version, files.vocab_size).to_json()
    counts = {"kind": "conversations", "rows": 1000, "rejected": 0, "duplicates": 0, "train": ANSWERED, "heldout": 10}
    target.publish("conversations", prepared, "the first hundred", **counts)
    answered = make_answers_identity(spec, files, "the first hundred", "train", spec.responses)
    target.publish(
        "responses",
        answered.to_json(),
        "answers",
        samples=ANSWERED,
        tokens=ANSWERED * 300,
        supervised_tokens=ANSWERED * 200,
    )
    target.publish("tokenized_train", {"responses": "answers"}, "tokens", samples=ANSWERED)
    captured = FeaturesIdentity("tokens", files.digest, subject.taps, spec.capture.to_identity())
    target.publish("training_features", captured.to_json(), "features", samples=ANSWERED, bytes=1)


def made_shares(target: PlannedTarget) -> dict[str, float]:
    steps = {step.asset: step for step in target.plan().ways["stored"].steps}
    return {asset: steps[asset].made_share for asset in ("responses", "training_features")}


def test_a_larger_choice_of_the_same_conversations_goes_on_from_the_features_of_a_smaller(tmp_path: Path):
    target = PlannedTarget(tmp_path, entry={"responses": {"mode": "regenerate"}})
    publish_features(target)
    assert made_shares(target) == pytest.approx({"responses": 1, "training_features": 1})
    target.edit(data={"max_conversations": 200})
    assert made_shares(target) == pytest.approx({"responses": 0.5, "training_features": 0.5})


@pytest.mark.parametrize("read", [True, False], ids=["digest known", "digest unknown"])
def test_features_of_conversations_that_were_replaced_are_not_there(tmp_path: Path, read: bool):
    target = PlannedTarget(tmp_path, entry={"responses": {"mode": "regenerate"}})
    publish_features(target)
    row = {"messages": [{"role": "user", "content": "v" * 400}, {"role": "assistant", "content": "b" * 1200}]}
    (tmp_path / "registry" / "data" / "talks.jsonl").write_text((json.dumps(row) + "\n") * 1000)
    if read:
        target.digest_files()
    assert made_shares(target) == {"responses": 0, "training_features": 0}


def test_features_of_other_answers_to_the_same_conversations_are_not_there(tmp_path: Path):
    target = PlannedTarget(tmp_path, entry={"responses": {"mode": "regenerate"}})
    publish_features(target)
    target.edit(responses={"mode": "regenerate", "temperature": 0.5})
    assert made_shares(target) == {"responses": 0, "training_features": 0}


def test_what_is_there_for_another_target_with_the_same_weights_is_there(tmp_path: Path):
    one = PlannedTarget(tmp_path, entry={"responses": {"mode": "regenerate"}})
    other = PlannedTarget(tmp_path, "other", entry={"responses": {"mode": "regenerate"}})
    other.edit(model="models/one", data={"max_conversations": 100})
    publish_features(one)
    plan = other.plan()
    assert made_shares(other) == pytest.approx({"responses": 1, "training_features": 1})
    step = plan.ways["stored"].find_step("responses")
    assert step is not None
    assert not step.is_made  # its record is still to be written
    assert step.seconds.high < 20.01  # what a program takes to start
    assert plan.amounts["train"].generated.value == plan.amounts["train"].generated.high == ANSWERED * 200
    other.edit(data={"max_conversations": 200})
    assert made_shares(other) == pytest.approx({"responses": 0.5, "training_features": 0.5})
    other.edit(model="models/other")
    other.digest_files()
    assert made_shares(other) == {"responses": 0, "training_features": 0}


def test_answers_that_an_interrupted_step_has_kept_count_for_their_share_and_their_length(tmp_path: Path):
    """Of 40 conversations 20 are answered with 30 tokens each; answers to other conversations lie in the same file."""
    target = PlannedTarget(tmp_path, entry={"responses": {"mode": "regenerate"}, "capture": {"device": "cpu"}})
    target.digest_files()
    subject = target.subject
    spec, files, version = subject.target, subject.files, subject.find_data_version("heldout")
    assert files is not None
    asked = [Conversation.of([Turn("user", f"{number}?"), Turn("assistant", "")]) for number in range(60)]

    def prepare(folder: Path) -> BuildResult:
        write_conversations(folder / "train", asked[:40])
        counts = {"rows": 45, "rejected": 0, "duplicates": 0, "train": 40, "heldout": 5, "kind": "conversations"}
        return BuildResult("prepared", counts)

    identity = identify_conversations(spec, version, files.vocab_size).to_json()
    target.artifacts.obtain("conversations", "one", {**identity, "code_version": "1"}, prepare)
    run = RegenerateRun(
        out=tmp_path / "out",
        target=files,
        conversations=tmp_path,
        answers=target.artifacts.root / "answers" / files.digest,
        responses=spec.responses,
        max_length=spec.max_length,
        capture=spec.capture,
    )
    assert made_shares(target)["responses"] == 0
    kept = RecordFile(find_answers_file(run), identify_kept(run))
    kept.extend({"id": each.id, "ids": [7] * 50, "generated": [[20, 50]]} for each in asked[20:])
    assert made_shares(target)["responses"] == 0.5
    train = target.plan().amounts["train"]
    assert (train.samples.value, train.tokens.value, train.generated.value) == pytest.approx((40, 40 * 50, 40 * 30))
    assert train.generated.high < 40 * 60
    target.edit(responses={"mode": "regenerate", "temperature": 0.5})
    assert made_shares(target)["responses"] == 0
