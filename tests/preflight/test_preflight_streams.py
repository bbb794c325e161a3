"""`draftworks check` says what of this machine a streamed training would fail for.
`check` counts rows that share a prompt, and says which prompts of an eval set are trained on.
A column to slice by is refused if no eval set has it, and only then.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from served_toys import body, write_log

from draftworks.preflight import services
from draftworks.storage.shared_folder import Mount

MOONCAKE = {"store": {"kind": "mooncake"}}


def check(fleet, streaming: dict) -> list[str]:
    fleet.write(streaming=streaming)
    return fleet.check().errors


def test_a_local_folder_is_in_order(fleet):
    assert check(fleet, {"control_folder": "control"}) == []


def test_a_database_on_a_network_file_system_is_an_error(fleet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(services, "find_mount", lambda path: Mount(Path("/mnt/all"), "nfs4"))
    (error,) = check(fleet, {})
    assert "var of the deployment" in error
    assert "is on a network file system (nfs4, on /mnt/all)" in error


def test_a_control_folder_that_cannot_be_written_is_an_error(fleet, tmp_path: Path):
    (tmp_path / "file").write_text("")
    (error,) = check(fleet, {"control_folder": str(tmp_path / "file" / "control")})
    assert "streaming.control_folder: expected a folder that this user may write to" in error


def test_a_python_without_mooncake_is_an_error(fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'mooncake'\" >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    (error,) = check(fleet, MOONCAKE)
    assert "this Python: No module named 'mooncake'. Install draftworks[mooncake]" in error


def test_an_unknown_kind_of_store_names_those_that_there_are(fleet):
    (error,) = check(fleet, {"store": {"kind": "s3"}})
    assert "streaming.store.kind: " in error
    assert "expected one of shared_dir, mooncake, found 's3'" in error


@pytest.mark.parametrize(
    ("limit", "kind"), [(8 * 2 * 4 * 128 * 2 - 1, "errors"), (8 * 10 * 4 * 128 * 2, "warnings"), (1 << 30, None)]
)
def test_bytes_below_a_global_batch_are_reported(fleet, limit: int, kind: str | None):
    """A token has 3 taps and `last` of 128 values in bfloat16; a batch has 8 samples of more than 10 tokens."""
    fleet.write(streaming={"watermark": {"samples": None, "bytes": limit}})
    found = fleet.check()
    told = {key for key in ("errors", "warnings") if any("watermark.bytes" in text for text in getattr(found, key))}
    assert told == ({kind} if kind else set()), found


@pytest.mark.parametrize(
    ("listen", "there"),
    [("127.0.0.1:0", True), ("0.0.0.0:7000", True), ("192.0.2.1:0", False)],
)
def test_an_address_that_this_machine_lacks_is_an_error(fleet, listen: str, there: bool):
    told = [error for error in check(fleet, {"control": {"listen": listen}}) if "streaming.control.listen" in error]
    assert len(told) == (not there)
    assert all(f"on which the launcher runs, found {listen}" in error for error in told)


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


def chats_of(fleet) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fleet.chats.read_text().splitlines()]


def slice_by(fleet, *columns: str, **entry: Any) -> list[str]:
    fleet.write(evaluation={"slices": list(columns)}, **entry)
    return fleet.check().errors


def add_eval_set(fleet, rows: list[dict[str, Any]]) -> None:
    root = fleet.root / "registry"
    (root / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "datasets" / "gold.yaml").write_text("files: [gold.jsonl]\n")
    (root / "evals" / "gold.yaml").write_text("dataset: gold\n")


def test_a_column_that_no_eval_set_has_is_refused(fleet):
    fleet.write_rows([{**row, "topic": "numbers"} for row in chats_of(fleet)])
    [error] = slice_by(fleet, "length", "topics")
    assert error == "target small: evaluation.slices: no eval set has a column 'topics'; did you mean topic?"
    [error] = slice_by(fleet, "weather")
    assert error.endswith("no eval set has a column 'weather'; there are: length, topic")


@pytest.mark.parametrize("there", ["heldout", "gold"])
def test_a_column_of_one_eval_set_is_enough(fleet, there: str):
    chats = chats_of(fleet)
    topics = [{**row, "topic": "numbers"} for row in chats]
    fleet.write_rows(topics if there == "heldout" else chats)
    add_eval_set(fleet, topics if there == "gold" else chats)
    assert slice_by(fleet, "topic", evals=["gold"]) == []


def test_a_column_that_only_a_late_row_has_is_found(fleet):
    chats = chats_of(fleet)
    fleet.write_rows([*chats * 5, {**chats[0], "topic": "numbers"}])
    assert slice_by(fleet, "topic") == []
    assert len(slice_by(fleet, "topics")) == 1


def test_a_mix_has_columns_of_its_own(fleet):
    assert len(slice_by(fleet, "source")) == 1
    (fleet.root / "registry" / "more.jsonl").write_text(json.dumps(chats_of(fleet)[0]) + "\n")
    (fleet.root / "registry" / "datasets" / "more.yaml").write_text(yaml.safe_dump({"files": ["more.jsonl"]}))
    assert slice_by(fleet, "source", "language", mix={"datasets": ["more"]}) == []
