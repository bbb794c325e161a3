"""Identities of results: a change of any input gives another identity."""

from __future__ import annotations

import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftworks.config.registry_files import CaptureSpec, DataSpec, ResponseSpec, TargetSpec, TrainingSpec
from draftworks.config.run_files import FeatureSet, TargetFiles
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.planning.identities import Conversations, DraftInputs, identify_answers
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.records import EvalData
from draftworks.targets.registry import Registry

TARGET = TargetSpec(name="t", model="m", dataset="d")
SGLANG = CaptureSpec(backend="sglang")


def artifact(asset: str, data_version: str = "v") -> Artifact:
    return Artifact(asset, "t", Path("/nowhere"), {}, data_version, {"kind": "chat"}, {}, 0.0, 0.0)


SOURCE = Conversations(artifact("conversations"), "train", "d")
OTHER_SOURCE = Conversations(artifact("conversations", "w"), "train", "d")
ANSWERED: dict[str, dict[str, Any]] = {
    "conversations": {"source": OTHER_SOURCE},
    "part": {"source": replace(SOURCE, part="heldout")},
    "answers": {"responses": ResponseSpec(seed=1)},
    "length": {"target": TARGET.model_copy(update={"max_length": 64})},
    "turns": {"target": TARGET.model_copy(update={"data": DataSpec(only_last_turn=True)})},
    "dtype": {"target": TARGET.model_copy(update={"capture": CaptureSpec(compute_dtype="float32")})},
    "engine": {"target": TARGET.model_copy(update={"capture": SGLANG})},
    "arguments of the engine": {
        "target": TARGET.model_copy(
            update={"capture": CaptureSpec(backend="sglang", server={"args": ["--quantization", "fp8"]})}
        )
    },
}


@pytest.mark.parametrize("change", ANSWERED)
def test_whatever_decides_answers_is_part_of_their_identity(tiny_target: TargetFiles, change: str) -> None:
    inputs = {"target": TARGET, "files": tiny_target, "source": SOURCE, "responses": ResponseSpec()}
    made = [identify_answers(**inputs), identify_answers(**{**inputs, **ANSWERED[change]})]
    if change == "arguments of the engine":
        made.append(identify_answers(**{**inputs, **ANSWERED["engine"]}))
    assert all(made.count(each) == 1 for each in made)


@pytest.mark.parametrize("name", ["digest", "tokenizer_digest"])
def test_another_target_or_tokenizer_answers_again(tiny_target: TargetFiles, name: str) -> None:
    other = tiny_target.model_copy(update={name: "f" * 16})
    assert identify_answers(TARGET, tiny_target, SOURCE, ResponseSpec()) != identify_answers(
        TARGET, other, SOURCE, ResponseSpec()
    )


def test_answers_that_are_there_do_not_depend_on_the_target_but_on_its_tokenizer(tiny_target: TargetFiles) -> None:
    taken, other = ResponseSpec(mode="passthrough"), tiny_target.model_copy(update={"digest": "f" * 16})
    assert identify_answers(TARGET, tiny_target, SOURCE, taken) == identify_answers(TARGET, other, SOURCE, taken)


def test_every_input_of_a_draft_is_part_of_its_identity(tiny_target: TargetFiles) -> None:
    eagle3 = resolve_strategy("eagle3")
    inputs = DraftInputs(
        files=tiny_target,
        options={},
        training=TrainingSpec(),
        train_tokens=artifact("tokenized_train"),
        train_features=artifact("training_features"),
        heldout=FeatureSet(tokens=Path("a"), features=Path("b")),
        feature_versions={"hf2": "a", "last": "b"},
        heldout_data=EvalData("a", {"hf2": "a"}),
        vocab_mapping=artifact("vocab_mapping"),
        start_from=None,
    )
    changes = [
        {"files": tiny_target.model_copy(update={"digest": "f" * 16})},
        {"options": {"ttt_length": 3}},
        {"training": TrainingSpec(seed=1)},
        {"train_tokens": artifact("tokenized_train", "w")},
        {"feature_versions": {"hf2": "b", "last": "b"}},
        {"heldout_data": EvalData("b", {"hf2": "a"})},
        {"vocab_mapping": artifact("vocab_mapping", "w")},
    ]
    found = [replace(inputs, **change).to_identity(eagle3) for change in [{}, *changes]]
    assert all(found.count(each) == 1 for each in found)


@pytest.mark.parametrize("name", list_strategies())
def test_the_cut_of_a_batch_identifies_a_draft_where_its_loss_is_a_mean_over_it(
    tiny_target: TargetFiles, name: str
) -> None:
    """Under every `loss` that a strategy has: with EAGLE-3's and P-EAGLE's of SpecForge, and with no other."""
    strategy = resolve_strategy(name)
    field = strategy.options.model_fields.get("loss")
    for loss in (None,) if field is None else typing.get_args(field.annotation):
        cuts = [
            DraftInputs(
                files=tiny_target,
                options={} if loss is None else {"loss": loss},
                training=TrainingSpec(global_batch_size=8, micro_batch_size=micro, processes=processes),
                train_tokens=artifact("tokenized_train"),
                train_features=artifact("training_features"),
                heldout=FeatureSet(tokens=Path("a"), features=Path("b")),
                feature_versions={"hf2": "a"},
                heldout_data=EvalData("a", {"hf2": "a"}),
                vocab_mapping=None,
                start_from=None,
            ).to_identity(strategy)
            for micro, processes in ((1, 1), (4, 1), (4, 2))
        ]
        by_cut = (name, loss) in {("eagle3", "specforge"), ("peagle", "specforge")}
        assert (cuts[0] != cuts[1]) is by_cut
        assert cuts[1] == cuts[2]


def test_results_of_a_run_are_identified_by_what_the_run_made_them_of(finished_site) -> None:
    made = ArtifactStore(finished_site.var)
    of = {
        name: made.load_current(name, "small")
        for name in ("tokenized_train", "responses", "conversations", "eagle3_draft")
    }
    target = Registry(finished_site.registry).load_target("small")
    features = made.load_current("training_features", "small").identity
    assert features["tokens"] == of["tokenized_train"].data_version
    assert features["capture"] == target.capture.to_identity()
    assert of["responses"].identity["conversations"] == of["conversations"].data_version
    report = made.load_current("eagle3_report", "small").identity
    assert report["draft"] == of["eagle3_draft"].data_version
    assert report["draft_identity"] == of["eagle3_draft"].path.name
    assert report["evaluation"] == target.evaluation.to_identity()
    assert report["limits"] == [target.responses.max_new_tokens, target.max_length]
    assert report["bigram_tokens"] == of["tokenized_train"].data_version
    assert features["target"] == of["responses"].identity["target"] == of["eagle3_draft"].identity["target"]
