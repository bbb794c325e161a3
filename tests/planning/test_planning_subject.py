"""What a plan counts as there: results of the same files and settings, whichever conversations were chosen of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planning_toys import PlannedTarget

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
    target.publish("responses", answered.to_json(), "answers", samples=ANSWERED, tokens=ANSWERED * 300)
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
