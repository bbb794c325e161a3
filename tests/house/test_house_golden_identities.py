"""Identities of results that exist in installations: values that were computed once, in golden_identities.json.

A result whose identity moves is made again, and everything after it: hidden states of a large target cost days. Where that
is meant, because the old result could be wrong, print the new values and put them in, with the reason in the commit:

    python -m pytest tests/house/test_house_golden_identities.py -vv
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftworks.capture.answers.answer_sets import make_answers_identity
from draftworks.capture.engine import make_engine_identity
from draftworks.config.decoding import GREEDY
from draftworks.config.registry_files import CaptureSpec, ResponseSpec, StrategyEntry, TargetSpec
from draftworks.config.run_files import RegenerateRun, TargetFiles
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.data.conversations import Conversation, Turn
from draftworks.evaluation.ladder.loop import LoopIdentity
from draftworks.planning.identities import Conversations, identify_answers
from draftworks.storage.artifacts import Artifact
from draftworks.storage.identity import FeatureIdentity, FileDigests, LastHidden, LayerTap, digest, token_digest
from draftworks.targets.registry import Registry, resolve_recipe
from draftworks.targets.resolve import resolve_target

GOLDEN = json.loads(Path(__file__).with_name("golden_identities.json").read_text())
CAPTURES = {
    "hf": CaptureSpec(),
    "hf, float32": CaptureSpec(compute_dtype="float32", dtype="float32"),
    "sglang": CaptureSpec(backend="sglang"),
    "sglang_server with arguments": CaptureSpec(backend="sglang_server", server={"args": ["--quantization", "fp8"]}),
    "custom": CaptureSpec(backend="custom", custom={"entry_point": "a:b", "engine": "mine", "numerics": 2}),
}
RESPONSES = {
    "generated": ResponseSpec(),
    "sampled": ResponseSpec(temperature=0.6, top_p=0.9, seed=3, thinking=True),
    "from an endpoint": ResponseSpec(endpoint={"base_urls": ["http://127.0.0.1:1/v1"], "server": "vllm"}),
    "passed through": ResponseSpec(mode="passthrough"),
}
FILES = TargetFiles(
    name="t",
    model="/m",
    tokenizer="/m",
    digest="0123456789abcdef",
    tokenizer_digest="fedcba9876543210",
    num_layers=8,
    hidden_size=128,
    vocab_size=2048,
    context=512,
)


def options_of(strategy: str) -> dict[str, Any]:
    fields = resolve_strategy(strategy).options.model_fields
    return {name: 7 for name, field in fields.items() if field.is_required()}


def recipes() -> dict[str, Any]:
    named = {"name": "t", "model": "m", "dataset": "d"}
    targets = {each: {"strategies": {each: StrategyEntry(options=options_of(each))}} for each in list_strategies()}
    targets |= {f"capture by {name}": {"capture": spec} for name, spec in CAPTURES.items()}
    targets |= {f"responses {name}": {"responses": spec} for name, spec in RESPONSES.items()}
    registry = Registry(Path("/nowhere"))
    return {name: digest(resolve_recipe(TargetSpec(**named, **more), registry)) for name, more in targets.items()}


def keys_of_features() -> dict[str, Any]:
    tokens = token_digest([1, 2, 3])
    found = {}
    for name, capture in CAPTURES.items():
        identity = FeatureIdentity(FILES.digest, make_engine_identity(capture), capture.dtype)
        found[name] = [identity.key(tokens, stream) for stream in (LayerTap(3), LastHidden())]
    return found


def answers() -> dict[str, Any]:
    def run(responses: ResponseSpec) -> RegenerateRun:
        folders = {"out": Path("/o"), "conversations": Path("/c"), "answers": Path("/a")}
        capture = CaptureSpec(compute_dtype="float32")
        return RegenerateRun(target=FILES, responses=responses, max_length=128, capture=capture, **folders)

    generating = {name: each for name, each in RESPONSES.items() if each.mode == "regenerate"}
    return {name: digest(make_answers_identity(run(each))) for name, each in generating.items()}


def answered() -> dict[str, Any]:
    made = Artifact("conversations", "t", Path("/nowhere"), {}, "v", {"kind": "chat"}, {}, 0.0, 0.0)
    source = Conversations(made, "train", "d")
    spec = TargetSpec(name="t", model="m", dataset="d")
    return {name: digest(identify_answers(spec, FILES, source, each).to_json()) for name, each in RESPONSES.items()}


def loop() -> str:
    return LoopIdentity(
        weights_digest="w",
        strategy="eagle3",
        options={"ttt_length": 7},
        target_digest="t",
        prompts="p",
        decoding=GREEDY,
        draft_tokens=7,
        stop_ids=(1,),
        max_new_tokens=64,
        max_length=None,
        compute_dtype="float32",
        seed=42,
        revision=1,
    ).key


def embedded_target() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2] / "registry"
    spec = TargetSpec(name="tiny", model="models/tiny", dataset="stdlib", max_length=128)
    files = resolve_target(spec, Registry(root), FileDigests(None))
    return {"weights": files.digest, "tokenizer": files.tokenizer_digest}


def conversation() -> str:
    return Conversation.of([Turn("user", "Zwölf?"), Turn("assistant", "12")], {"task": "sum"}).id


@pytest.mark.parametrize(
    "compute",
    [recipes, keys_of_features, answers, answered, loop, embedded_target, conversation],
    ids=lambda f: f.__name__,
)
def test_identities_of_results_that_exist_have_not_moved(compute) -> None:
    found, golden = compute(), GOLDEN[compute.__name__]
    if compute is recipes:  # a strategy that is new has no results yet
        found = {name: found[name] for name in golden}
    assert found == golden
