"""Data with token ids that the model's vocabulary does not have ends the examination where it would end the run."""

from __future__ import annotations

import json

import pytest

CHATTY = "What is a quaternion, and how does its multiplication table look?"


@pytest.mark.parametrize("rows", [20, 200], ids=["all known", "the first known"])
@pytest.mark.parametrize("kind", ["passthrough", "prompts", "tokens"])
def test_a_tokenizer_of_another_model_is_an_error_where_data_has_its_ids(fleet, kind: str, rows: int):
    """Every prompt, answer or row has an id that the model's vocabulary does not have, so the run would stop."""
    config = fleet.own_model() / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 1000}))
    fleet.write(
        model=str(config.parent),
        responses={"mode": "regenerate" if kind == "prompts" else "passthrough"},
        max_length=512,
    )
    turns = {"passthrough": [("user", "{}"), ("assistant", CHATTY)], "prompts": [("user", CHATTY + " {}")]}
    if kind == "tokens":
        fleet.write_rows([{"input_ids": [5, 6, 1000 + n], "loss_mask": [0, 1, 1]} for n in range(rows)])
    else:
        fleet.write_rows(
            [
                {"messages": [{"role": role, "content": text.format(n)} for role, text in turns[kind]]}
                for n in range(rows)
            ]
        )
    found = fleet.check()
    assert any("vocabulary" in e or "expected 0 to 999" in e or "of another model" in e for e in found.errors)
    assert kind == "tokens" or any("ids up to" in warning for warning in found.warnings)


def test_a_tokenizer_with_ids_that_no_data_has_is_a_warning(fleet):
    config = fleet.own_model() / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 2000}))
    fleet.write(model=str(config.parent), responses={"mode": "passthrough"})
    found = fleet.check()
    assert any("ids up to" in warning for warning in found.warnings)
    assert not any("vocabulary" in error or "of another model" in error for error in found.errors)
