"""Prompts without answers: every benchmark is such data, and so is what people ask that nobody has answered yet."""

from __future__ import annotations

from typing import Any

from chat_tokenizers import DROPS_THOUGHTS

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


def test_answers_that_the_target_gives_anew_need_not_be_printed_by_its_template(fleet):
    """Data with thoughts, and a template that moves them."""
    template = DROPS_THOUGHTS.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}?"},
                {"role": "assistant", "content": f"<think>\nhm {n}\n</think>\n\nIt."},
            ]
        }
        for n in range(40)
    ]
    fleet.write_rows(rows)
    with_template(fleet, template)
    assert fleet.check().errors == []


def test_a_template_that_does_not_print_what_is_asked_is_refused(fleet):
    with_template(fleet, PARTS)
    (error,) = [text for text in fleet.check().errors if "none of" in text][:1]
    assert "does not print turn 1 (user), 'What is " in error
