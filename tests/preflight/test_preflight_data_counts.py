"""Data that is too little for a global batch, for a held-out part, or for decisions.
Lengths of the first rows: what gives no sample, does not fit into a row, or is too little to learn from.
Prompts without answers: every benchmark is such data, and so is what people ask that nobody has answered yet.
Data with token ids that the model's vocabulary does not have ends the examination where it would end the run.
A mix of what cannot be mixed, and shares of slices that no row has, are refused before anything is prepared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from chat_tokenizers import FORGETS, KEEPS_APART

from draftworks.config.registry_files import DatasetSpec
from draftworks.config.service import LEAST_PROMPTS
from draftworks.preflight.data_checks import count_dataset


def make_chats(count: int, exchanges: int = 1) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}] * exchanges
    return [{"messages": [{"role": "user", "content": f"No. {number}"}, *turns[1:]]} for number in range(count)]


def train_with(fleet, batch: int, **entry: Any):
    training = {"global_batch_size": batch}
    fleet.write(
        strategies={"eagle3": {"options": {"ttt_length": 2, "draft_vocab_size": 64}, "training": training}}, **entry
    )
    found = fleet.check()
    return [[text for text in texts if "global_batch_size" in text] for texts in (found.errors, found.warnings)]


def test_a_global_batch_of_more_than_all_samples_is_an_error(fleet):
    [error], warnings = train_with(fleet, 40)
    assert "found 40, and there are at most 26 samples to train on" in error
    assert warnings == []
    assert train_with(fleet, 26) == [[], []]


def test_conversations_of_several_answers_may_give_more_samples(fleet):
    fleet.write_rows(make_chats(30, exchanges=2))
    errors, [warning] = train_with(fleet, 40)
    assert errors == []
    assert "about 2" in warning
    [error], _ = train_with(fleet, 40, data={"only_last_turn": True})
    assert "global_batch_size: found 40" in error


@pytest.mark.parametrize(
    ("entry", "batch", "severity"),
    [
        ({}, 95, "warning"),  # of 100 rows, and each may have several answers beyond the first ones
        ({}, 60, None),
        ({"responses": {"mode": "passthrough"}}, 100, "error"),
        ({"responses": {"mode": "passthrough"}}, 95, "warning"),
        ({"responses": {"mode": "passthrough"}, "data": {"max_conversations": 40}}, 40, "error"),
        ({"data": {"max_conversations": 40}}, 40, "warning"),
    ],
)
def test_of_a_larger_data_set_only_the_bound_is_known(fleet, entry, batch, severity):
    fleet.write_rows(make_chats(100))
    errors, warnings = train_with(fleet, batch, **entry)
    assert (bool(errors), bool(warnings)) == (severity == "error", severity == "warning")


def test_a_hold_out_that_leaves_none_is_an_error_where_all_rows_are_known(fleet):
    fleet.write_rows(make_chats(6))
    fleet.write(data={"held_out_share": 0.001})
    assert any("the 0 rows held out: none of" in error for error in fleet.check().errors)
    fleet.write_rows(make_chats(300))
    fleet.write(data={"held_out_share": 0.001})
    found = fleet.check()
    assert found.errors == []
    assert any("about 0.3 of 300 conversations are held out" in warning for warning in found.warnings)
    fleet.write(data={"held_out_share": 0.1})
    assert fleet.check().warnings == []


def test_an_eval_set_of_held_out_rows_that_are_none_is_an_error(fleet):
    root = fleet.root / "registry"
    (root / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_chats(1)))
    (root / "datasets" / "gold.yaml").write_text("files: [gold.jsonl]\n")
    (root / "evals" / "gold.yaml").write_text("dataset: gold\npart: held_out\n")
    fleet.write(evals=["gold"], data={"held_out_share": 0.05}, strategies={})
    assert [error for error in fleet.check().errors if "the 0 rows of eval set gold" in error]
    (root / "evals" / "gold.yaml").write_text("dataset: gold\n")
    assert not [error for error in fleet.check().errors if "eval set gold" in error]


@pytest.mark.parametrize("rows", [30, 300])
def test_too_few_prompts_to_decide_by_are_a_warning(fleet, rows):
    fleet.write_rows(make_chats(rows))
    fleet.write(service={"least_prompts": 200}, decision={})
    found = fleet.check()
    assert found.errors == []
    assert any("eval set heldout has about" in warning and "below 200" in warning for warning in found.warnings)
    fleet.write(service={"least_prompts": 1}, decision={"least_prompts": 1})
    assert not any("eval set" in warning for warning in fleet.check().warnings)


def test_a_number_of_prompts_of_ones_own_stands_and_is_a_warning_below_the_default(fleet):
    for section in ("service", "decision"):
        for number, warned in ((20, True), (LEAST_PROMPTS - 1, True), (LEAST_PROMPTS, False), (500, False)):
            fleet.write(**{"service": {}, "decision": {}, section: {"least_prompts": number}})
            found = fleet.check()
            assert found.errors == []
            named = [text for text in found.warnings if f"{section}.least_prompts: found {number};" in text]
            assert len(named) == warned
            assert all(len(text) <= 200 for text in named)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_are_counted_up_to_what_matters(tmp_path: Path, suffix: str):
    path, rows = tmp_path / f"rows{suffix}", make_chats(12)
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows)))
    dataset = DatasetSpec(name="rows", files=[path.name])
    assert count_dataset(dataset, tmp_path, 100) == 12
    assert count_dataset(dataset, tmp_path, 5) == 5


def make_long_chats(count: int, words: int = 3, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{number} " + "and " * words},
                {"role": "assistant", "content": f"It is {number} indeed."},
            ]
        }
        for number in range(first, first + count)
    ]


PASSTHROUGH = {"responses": {"mode": "passthrough"}}


@pytest.mark.parametrize("entry", [{}, PASSTHROUGH], ids=["regenerate", "passthrough"])
@pytest.mark.parametrize(
    ("rows", "severity"),
    [
        (make_long_chats(54) + make_long_chats(6, words=200, first=54), "errors"),  # all rows of the data set are known
        (make_long_chats(54) + make_long_chats(10, words=200, first=54) + make_long_chats(500, first=64), "warnings"),
        (make_long_chats(200), None),
        (make_long_chats(63) + make_long_chats(1, words=200, first=63) + make_long_chats(500, first=64), None),
    ],
    ids=["whole", "sample", "none too long", "as many as allowed"],
)
def test_prompts_without_room_count_against_the_allowed_share(fleet, entry, rows, severity):
    fleet.write_rows(rows)
    fleet.write(**entry)
    found = fleet.check()
    told = {
        kind: [text for text in getattr(found, kind) if "give no sample" in text] for kind in ("errors", "warnings")
    }
    assert {kind for kind, texts in told.items() if texts} == ({severity} if severity else set()), found
    assert severity == "errors" or found.errors == []
    if severity:
        [first, *_] = told[severity]
        assert "; allowed: 5.0%, data.max_rejected_share)" in first
        assert "tokens leaves no room within max_length 96" in first or "no supervised token in the first 96" in first


def test_more_may_be_lost_where_the_target_allows_it(fleet):
    fleet.write_rows(make_long_chats(54) + make_long_chats(6, words=200, first=54))
    fleet.write(data={"max_rejected_share": 0.5})
    assert fleet.check().errors == []


def test_an_eval_set_is_checked_as_the_part_that_it_takes(fleet):
    rows = make_long_chats(20) + make_long_chats(20, words=200, first=20)
    root = fleet.root / "registry"
    text = fleet.chats.read_text()
    fleet.write_rows(rows)
    (root / "gold.jsonl").write_text(fleet.chats.read_text())
    fleet.chats.write_text(text)
    (root / "datasets" / "gold.yaml").write_text("files: [gold.jsonl]\n")
    (root / "evals" / "gold.yaml").write_text("dataset: gold\n")
    fleet.write(evals=["gold"], **PASSTHROUGH)
    [error] = fleet.check().errors
    assert "data set gold: 20 of the 40 rows of eval set gold give no sample (50.0%;" in error


@pytest.mark.parametrize("entry", [{}, PASSTHROUGH], ids=["regenerate", "passthrough"])
def test_samples_that_do_not_fit_into_a_packed_row_are_an_error(fleet, entry):
    def check(**training: Any):
        eagle = {"options": {"ttt_length": 2, "draft_vocab_size": 64}, "training": training}
        fleet.write(strategies={"eagle3": eagle}, **entry)
        return fleet.check()

    fleet.write_rows(make_long_chats(40) + make_long_chats(5, words=40, first=40))
    [error] = check(pack_tokens=40).errors
    assert "tokens, more than pack_tokens 40 of eagle3, and the training ends there" in error
    assert check(pack_tokens=40, pack_overlong="own_row").errors == []
    fitting = check(pack_tokens=80)
    assert fitting.errors == []
    assert any("pack_tokens: found 80" in warning for warning in fitting.warnings)
    assert check(pack_tokens=96).warnings == []


def test_rows_that_may_not_be_chosen_do_not_have_to_fit_into_a_packed_row(fleet):
    fleet.write_rows(make_long_chats(300) + make_long_chats(20, words=40, first=300))
    fleet.write_rows(make_long_chats(20, words=40) + make_long_chats(300, first=20))
    training = {"pack_tokens": 40}
    eagle = {"options": {"ttt_length": 2, "draft_vocab_size": 64}, "training": training}
    fleet.write(strategies={"eagle3": eagle}, data={"max_conversations": 100})
    assert fleet.check().errors == []
    fleet.write(strategies={"eagle3": eagle})
    assert len(fleet.check().errors) == 1


@pytest.mark.parametrize(
    ("entry", "bound"),
    [
        (
            {"responses": {"max_new_tokens": 2}, "data": {"min_supervised_share": 0.5}},
            "with responses.max_new_tokens 2",
        ),
        ({"data": {"min_supervised_share": 0.8}, **PASSTHROUGH}, "to train on, at most"),
    ],
)
def test_a_share_of_supervised_tokens_that_no_answer_reaches(fleet, entry, bound):
    fleet.write_rows(make_long_chats(40, words=20))
    fleet.write(**entry)
    found = fleet.check()
    assert any(bound in error and "(data.min_supervised_share)" in error for error in found.errors), found
    fleet.write_rows(make_long_chats(400, words=20))
    fleet.write(**entry)
    found = fleet.check()
    assert found.errors == []
    assert any("(data.min_supervised_share)" in warning for warning in found.warnings)
    fleet.write(**{**entry, "data": {"min_supervised_share": 0.02}})
    assert fleet.check() == type(found)([], [], [])


def test_answers_of_one_token_are_an_error_unless_no_answer_is_made(fleet):
    fleet.write(responses={"max_new_tokens": 1})
    assert any("responses.max_new_tokens is 1" in error for error in fleet.check().errors)
    fleet.write_rows([{"input_ids": [5, number, 7, 8], "loss_mask": [0, 0, 1, 1]} for number in range(60)])
    fleet.write(responses={"max_new_tokens": 1, "mode": "passthrough"})
    assert fleet.check().errors == []


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


def chats_of(fleet) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fleet.chats.read_text().splitlines()]


def mix(fleet, rows: list[dict[str, Any]], **options: Any) -> list[str]:
    root = fleet.root / "registry"
    (root / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "datasets" / "more.yaml").write_text(yaml.safe_dump({"files": ["more.jsonl"]}))
    fleet.write(mix={"datasets": ["more"], **options.pop("mix", {})}, **options)
    return fleet.check().errors


def test_tokenized_data_cannot_be_mixed(fleet):
    rows = [{"input_ids": [5, number, 7, 8], "loss_mask": [0, 0, 1, 1]} for number in range(9)]
    [error] = mix(fleet, rows, responses={"mode": "passthrough"})
    assert error == "target small: mix: data set more is tokenized already, and only conversations can be mixed"


@pytest.mark.parametrize(
    ("shares", "absent"),
    [
        ({"colour": {"red": 1}}, "colour: no conversation has red"),
        ({"topic": {"a": 0.5, "b": 0.25, "zzz": 0.25}}, "topic: no conversation has zzz"),
        ({"source": {"chats": 0.5, "mere": 0.5}}, "source: no conversation has mere; did you mean more?"),
        ({"prompt_length": {"under 5": 1}}, "prompt_length: no conversation has under 5"),
        ({"topic": {"a": 0.5, "b": 0.5, "zzz": 0}}, None),
        ({"topic": {"late": 1}}, None),
        ({"topic": {7: 1}}, None),
        ({"source": {"chats": 0.5, "more": 0.5}}, None),
        ({"language": {"en": 1}}, None),
    ],
)
def test_a_share_of_a_slice_that_no_row_has_is_refused(fleet, shares, absent):
    chats = chats_of(fleet)
    fleet.write_rows([{**row, "topic": "a"} for row in chats])
    rows = [{**row, "topic": "b"} for row in chats * 3] + [{**chats[0], "topic": "late"}, {**chats[1], "topic": 7}]
    errors = mix(fleet, rows, mix={"shares": shares})
    if absent is None:
        assert errors == []
    else:
        assert (
            [error for error in errors if f"mix.shares: {absent}" in error and "Set the share to 0" in error]
            == errors
            != []
        )
