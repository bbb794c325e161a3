"""What the last steps would refuse of a draft, its formats and its serving, is refused before the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from model_families import DRAFT_OPTIONS

from draftworks.config.run_files import TargetFiles

EAGLE = {"eagle3": {"options": {"ttt_length": 2, "draft_vocab_size": 64}}}
DFLASH = {"dflash": {"options": {"mask_token_id": 3, "block_size": 4}}}
DSPARK = {"dspark": {"options": {"mask_token_id": 3, "block_size": 4}}}
CPU = {"prompts": 2, "device": "cpu", "compute_dtype": "float32"}
ANYWHERE = {"prompts": 2, "device": "cuda"}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dtype": (EAGLE, {"serving": {**CPU, "compute_dtype": "bfloat16"}}, "on a CPU expected float32, found bfloat16"),
    "algorithm": (DSPARK, {"serving": CPU}, "does not serve drafts with --speculative-algorithm DSPARK on a CPU"),
    "proposals": (DFLASH, {"draft_tokens": 2, "serving": ANYWHERE}, "evaluation.draft_tokens: found 2, and in SGLang"),
    "argument": (
        EAGLE,
        {"serving": {**ANYWHERE, "server": {"args": ["--speculative-algorithm", "NGRAM"]}}},
        "serving.server.args: --speculative-algorithm: set from the draft",
    ),
    "argument with its value": (
        EAGLE,
        {"serving": {**ANYWHERE, "server": {"args": ["--speculative-num-steps=9"]}}},
        "serving.server.args: --speculative-num-steps=9",
    ),
    "format of another server": (
        EAGLE,
        {"serving": {**ANYWHERE, "format": "speculators_eagle3"}},
        "will have no export for SGLang in speculators_eagle3; did you mean sglang_eagle3",
    ),
    "format that is not written": (
        {"eagle3": {**EAGLE["eagle3"], "export": {"formats": ["speculators_eagle3"]}}},
        {"serving": {**ANYWHERE, "format": "sglang_eagle3"}},
        "serving.format: eagle3 will have no export for SGLang in sglang_eagle3; there are: none",
    ),
}
SOUND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "on a CPU": (EAGLE, {"serving": CPU}),
    "not on a CPU": (DSPARK, {"serving": ANYWHERE}),
    "not asked for": (DSPARK, {"serving": {"prompts": 0, "device": "cpu"}}),
    "no draft of SGLang's": (
        {"peagle": {"options": {"draft_vocab_size": 64, "mask_token_id": 3}}},
        {"serving": {"prompts": 2, "device": "cpu"}},
    ),
    "no export": (
        {"eagle3": {**EAGLE["eagle3"], "export": {"formats": []}}},
        {"serving": {**CPU, "format": "sglang_eagle3"}},
    ),
    "as many proposals as trained": (DFLASH, {"draft_tokens": 3, "serving": ANYWHERE}),
    "fewer of a chain": (EAGLE, {"draft_tokens": 1, "serving": ANYWHERE}),
    "the same again": (
        EAGLE,
        {
            "serving": {
                **ANYWHERE,
                "server": {"args": ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk=1"]},
            }
        },
    ),
    "format of one of two": (EAGLE | DFLASH, {"serving": {**ANYWHERE, "format": "zlab_dflash"}}),
}


def errors_of(fleet, strategies: dict[str, Any], evaluation: dict[str, Any]) -> list[str]:
    """Without those that depend on this machine, which has no SGLang."""
    fleet.write(strategies=strategies, evaluation=evaluation)
    return [error for error in fleet.check().errors if "needs SGLang" not in error and "needs 1 GPU" not in error]


@pytest.mark.parametrize(("strategies", "evaluation", "message"), REFUSED.values(), ids=REFUSED)
def test_serving_that_the_last_step_refuses_is_an_error(fleet, strategies, evaluation, message):
    (error,) = errors_of(fleet, strategies, evaluation)
    assert message in error
    assert error.startswith("target small: ")


@pytest.mark.parametrize(("strategies", "evaluation"), SOUND.values(), ids=SOUND)
def test_serving_that_it_does_is_none(fleet, strategies, evaluation):
    assert errors_of(fleet, strategies, evaluation) == []


def test_a_draft_that_no_format_can_hold_is_refused(fleet, family_target: Callable[[str], TargetFiles]):
    fleet.write(model=family_target("gemma3").model, strategies={"xpress": {"options": DRAFT_OPTIONS["xpress"]}})
    (error,) = fleet.check().errors
    assert "strategies.xpress.export: speculators_xpress: the target multiplies" in error
    assert "speculators_xpress: the target multiplies its embeddings by" in error


@pytest.mark.parametrize(("formats", "refused"), [(["speculators_mtp"], True), (["target_mtp"], False), (None, False)])
def test_a_format_for_other_types_of_targets_is_refused_where_it_is_asked_for(
    fleet, mtp_target: Callable[[str], TargetFiles], formats, refused: bool
):
    entry = {"export": {} if formats is None else {"formats": formats}}
    fleet.write(model=mtp_target("deepseek_v3").model, strategies={"mtp": entry})
    errors = fleet.check().errors
    assert bool(errors) == refused
    assert all("a target of type deepseek_v3: this format's loaders know" in error for error in errors)
