"""Prompts without answers: every benchmark is such data, and so is what people ask that nobody has answered yet."""

from __future__ import annotations

from typing import Any

import pytest
from chat_tokenizers import FORGETS, KEEPS_APART

PROMPTS = [{"messages": [{"role": "user", "content": f"What is {n}?"}]} for n in range(40)]
PARTS = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' -}}{%- for part in m['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def with_template(fleet: Any, template: str, **entry: Any) -> None:
    (fleet.root / "registry" / "own.jinja").write_text(template)
    fleet.write(chat_template="own.jinja", **entry)


def test_the_target_answers_them(fleet):
    fleet.write_rows(PROMPTS)
    assert fleet.check().errors == []


def test_passthrough_is_told_what_to_do_for_what_is_trained_on_alone(fleet):
    fleet.write_rows(PROMPTS)
    fleet.write(responses={"mode": "passthrough"})
    (error,) = [text for text in fleet.check().errors if "supervised" not in text]
    assert "to train on: it has no answer" in error
    assert "set responses.mode to regenerate" in error


def test_as_an_eval_set_they_are_measured_on_beside_data_with_answers(fleet):
    folder = fleet.root / "registry"
    fleet.chats.rename(folder / "kept.jsonl")
    fleet.write_rows(PROMPTS)
    (folder / "datasets" / "bench.yaml").write_text("files: [chats.jsonl]\n")
    (folder / "datasets" / "chats.yaml").write_text("files: [kept.jsonl]\n")
    (folder / "evals" / "bench.yaml").write_text("dataset: bench\n")
    for mode in ("regenerate", "passthrough"):
        fleet.write(evals=["bench"], responses={"mode": mode, "max_new_tokens": 24})
        assert fleet.check().errors == []


@pytest.mark.parametrize("mode", ["regenerate", "passthrough"])
def test_answers_with_thoughts_are_learnt_where_the_template_moves_or_drops_them(fleet, mode):
    answers = [{"content": "<think>\nhm {n}\n</think>\n\nIt."}, {"content": "It.", "reasoning_content": "hm {n}"}]
    template = KEEPS_APART.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}?"},
                said,
                {"role": "user", "content": "And why?"},
                said,
            ]
        }
        for n in range(40)
        for said in [{"role": "assistant"} | {key: text.format(n=n) for key, text in answers[n % 2].items()}]
    ]
    fleet.write_rows(rows)
    with_template(fleet, template, responses={"mode": mode, "max_new_tokens": 24})
    assert fleet.check().errors == []


def test_answers_that_a_server_could_not_get_are_refused_with_the_place(fleet):
    """Every prompt ends the thought, and the data has one."""
    template = FORGETS + "{{- '<think></think>' -}}{%- endif -%}"
    said = {"role": "assistant", "content": "<think>hm</think>It is."}
    fleet.write_rows([{"messages": [*row["messages"], said]} for row in PROMPTS])
    with_template(fleet, template.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>"),
                  responses={"mode": "passthrough"})  # fmt: skip
    (error,) = [text for text in fleet.check().errors if "prompts end with" in text]
    assert "<think></think>', and the answer has a thought: set responses.thinking: true, or" in error


def test_what_rows_say_and_nobody_reads_is_noted(fleet):
    fleet.write_rows([{**row, "notes": ["a"]} for row in PROMPTS])
    (note,) = [text for text in fleet.check().notes if "not read" in text]
    assert note == "data set chats: of its first 40 rows these keys are not read: notes (40 rows)"


def test_a_template_that_does_not_print_what_is_asked_is_refused(fleet):
    with_template(fleet, PARTS)
    (error,) = [text for text in fleet.check().errors if "none of" in text][:1]
    assert "does not print turn 1 (user), 'What is " in error
