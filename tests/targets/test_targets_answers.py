"""Whose answers a set has: the target's own greedy ones, or others."""

from __future__ import annotations

from typing import Any

import pytest

from draftworks.config.registry_files import ResponseSpec, TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.storage.records import AnswersIdentity
from draftworks.targets.training_data import make_answers_identity, make_greedy_settings

TARGET = TargetSpec(name="small", model="acme/small", dataset="chats")
FILES = TargetFiles(
    name="small",
    model="acme/small",
    tokenizer="acme/small",
    digest="0123",
    tokenizer_digest="4567",
    num_layers=2,
    hidden_size=8,
    vocab_size=40,
    context=64,
)
ENDPOINT = {"base_urls": ["http://a:1/v1"], "server": "vllm"}


def identify(responses: ResponseSpec) -> AnswersIdentity:
    """The identity as a result has it: through JSON."""
    return AnswersIdentity(
        **{"args": None, **make_answers_identity(TARGET, FILES, "chats", "eval", responses).to_json()}
    )


@pytest.mark.parametrize(("kind", "greedy"), [("conversations", True), ("tokens", False)])
def test_eval_sets_are_answered_greedily_unless_they_are_tokens(kind: str, greedy: bool):
    found = identify(make_greedy_settings(TARGET, kind))
    assert found.is_greedy_of(FILES.digest) is greedy
    assert not found.is_greedy_of("other weights")


@pytest.mark.parametrize(
    "settings",
    [{"mode": "passthrough"}, {"temperature": 0.7}, {"repetition_penalty": 1.1}, {"endpoint": ENDPOINT}],
    ids=lambda settings: next(iter(settings)),
)
def test_other_answers_are_not_the_targets_greedy_ones(settings: dict[str, Any]):
    assert not identify(ResponseSpec(**settings)).is_greedy_of(FILES.digest)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, {"temperature": 0.0}),
        ({"top_k": 20, "top_p": 0.9}, {"temperature": 0.0}),  # of no effect on greedy answers
        ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_k": None, "top_p": 0.9}),
        ({"temperature": 0.7, "top_k": 20, "endpoint": ENDPOINT}, {"temperature": 0.7, "top_k": 20, "top_p": 1.0}),
        ({"temperature": 0.7, "repetition_penalty": 1.1}, None),
        ({"mode": "passthrough"}, None),
    ],
)
def test_how_the_target_wrote_the_answers_is_known_unless_something_else_had_a_say(
    settings: dict[str, Any], found: dict[str, Any] | None
):
    identity = identify(ResponseSpec(**settings))
    assert identity.find_sampling_of(FILES.digest) == found
    assert identity.find_sampling_of("other weights") is None
