"""`check` counts rows that share a prompt, and says which prompts of an eval set are trained on."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from served_toys import body, write_log


def make_rows(prompts: int, answers: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}?"},
                {"role": "assistant", "content": f"It is {k} indeed."},
            ]
        }
        for n in range(prompts)
        for k in range(answers)
    ]


def about_prompts(texts: list[str]) -> list[str]:
    return [text for text in texts if "prompt" in text and "least_prompts" not in text]


def test_prompts_that_come_once_are_not_mentioned(fleet):
    fleet.write_rows(make_rows(300))
    found = fleet.check()
    assert about_prompts([*found.notes, *found.warnings]) == []


@pytest.mark.parametrize("prompts", [10, 50])
def test_rows_that_share_a_prompt_are_counted_beyond_the_sample(fleet, prompts):
    single = [
        {"messages": [{"role": "user", "content": f"No. {n}"}, *row["messages"][1:]]}
        for n, row in enumerate(make_rows(40))
    ]
    fleet.write_rows([*single, *make_rows(prompts, 4), single[0]])  # a repeated row is dropped, and shares nothing
    (note,) = about_prompts(fleet.check().notes)
    assert f"data set chats: {4 * prompts} of its {40 + 4 * prompts} rows share a prompt" in note
    assert f"{40 + prompts} prompts" in note


def test_one_prompt_of_more_than_a_twentieth_of_the_rows_is_a_warning(fleet):
    fleet.write_rows([*make_rows(94), *make_rows(1, 7)[1:]])
    (warning,) = about_prompts(fleet.check().warnings)
    assert "7 of its 100 rows have one prompt (7%), 'What is 0?'" in warning
    fleet.write_rows([*make_rows(96), *make_rows(1, 5)[1:]])
    found = fleet.check()
    assert about_prompts(found.warnings) == []
    assert len(about_prompts(found.notes)) == 1


def test_rows_of_a_mix_share_prompts_across_its_sets_and_served_words_are_not_shown(fleet):
    fleet.write_rows(make_rows(30))
    write_log(fleet.root / "registry" / "a.log", [body(f"What is {n}?") for n in range(20)])
    (fleet.root / "registry" / "datasets" / "served.yaml").write_text("format: served\nfiles: [a.log]\n")
    fleet.write(mix={"datasets": ["served"]})
    found = fleet.check()
    (note,) = about_prompts(found.notes)
    assert "data set chats + served: 40 of its 50 rows share a prompt" in note


def test_prompts_of_an_eval_set_that_are_trained_on_are_counted(fleet):
    fleet.write_rows(make_rows(100))
    folder = fleet.root / "registry"
    other = [
        f'{{"messages": [{{"role": "user", "content": "what  is {n}?"}}, {{"role": "assistant", "content": "?"}}]}}\n'
        for n in range(60, 140)
    ]
    (folder / "bench.jsonl").write_text("".join(other))
    (folder / "datasets" / "bench.yaml").write_text("files: [bench.jsonl]\n")
    (folder / "evals" / "bench.yaml").write_text("dataset: bench\n")
    fleet.write(evals=["bench"], data={"held_out_share": 0.0001})
    (warning,) = [text for text in fleet.check().warnings if "eval set bench" in text and "trained on" in text]
    assert "40 of 80 prompts are trained on too" in warning
    (folder / "evals" / "bench.yaml").write_text(yaml.safe_dump({"dataset": "bench", "part": "held_out"}))
    assert [text for text in fleet.check().warnings if "trained on" in text] == []
