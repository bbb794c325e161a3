"""One bounded pass over logs: each line is a request or is counted by its reason, and nothing is invented."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from request_logs import BEGIN, HOUR_S, PLAIN, make_request, sglang_finished, vllm_answer, write_log, write_rows

from draftworks.config.observation import RequestsSpec
from draftworks.production import request_log as of
from draftworks.production.asked import digest_messages
from draftworks.production.request_log import LogReading, RequestLog, ServedBy, shorten
from draftworks.production.requests import ServedRequest
from draftworks.storage.identity import token_digest

NOW = BEGIN + 100 * HOUR_S
ASKED = {"messages": [{"role": "user", "content": "What is the use of it"}], "temperature": 0, "app": "chat"}


def find_draft(request: ServedRequest) -> ServedBy | None:
    return None if request.server == "stranger" else ServedBy("eagle3", request.draft or "d")


def read(folder: Path, *patterns: str, **more: Any) -> LogReading:
    spec = RequestsSpec(files=list(patterns or ["*.jsonl"]), **more)
    return RequestLog(spec, folder, ("models/small",), find_draft, lambda: NOW).read()


def read_rows(folder: Path, *rows: Any, **more: Any) -> LogReading:
    write_rows(folder / "log.jsonl", rows)
    return read(folder, **more)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "models/other"}, of.OTHER_MODEL),
        ({"time": NOW + 301}, of.AHEAD),
        ({"finish": "abort"}, of.ABORTED),
        ({"finish": "error", "answers": 2}, of.ABORTED),
        ({"answers": 2}, of.SEVERAL),
        ({"lossy": True}, of.LOSSY),
        ({"passes": None}, of.NO_COUNTS),
        ({"accepted": None}, of.NO_COUNTS),
        ({"passes": None, "completion_tokens": 1}, of.NOTHING_VERIFIED),
        ({"passes": 0, "accepted": 0}, of.NOTHING_VERIFIED),
        ({"passes": 0}, of.CONTRADICTORY),
        ({"server": "stranger"}, of.OTHER_SERVER),
        ({"id": "r1", "time": BEGIN + 5}, of.REPEATED),
    ],
)
def test_what_tells_nothing_of_a_draft_is_counted_apart(tmp_path: Path, changes: dict[str, Any], reason: str):
    write_log(tmp_path / "a.jsonl", [make_request(1), replace(make_request(2), **changes)])
    found = read(tmp_path)
    assert (len(found.requests["eagle3"]), found.apart, found.lines) == (1, {reason: 1}, 2)


@pytest.mark.parametrize(
    "changes", [{"model": None}, {"model": "models/small/"}, {"time": NOW + 299}, {"lossy": False}]
)
def test_what_is_not_said_or_within_the_clocks_is_used(tmp_path: Path, changes: dict[str, Any]):
    write_log(tmp_path / "a.jsonl", [replace(make_request(1), **changes)])
    assert read(tmp_path).apart == {}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(1, 200), st.integers(0, 5))
def test_a_log_that_is_cut_anywhere_loses_its_last_line_alone(tmp_path: Path, cut: int, whole: int):
    lines = [make_request(number).to_line() for number in range(whole + 1)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines)[:-cut] if cut < len(lines[-1]) else b"".join(lines[:-1]))
    found = read(tmp_path)
    kept = sum(len(each) for each in found.requests.values())
    assert kept == whole + (cut == 1)  # without its end alone the line is whole
    assert found.apart == ({of.HALF: 1} if 1 < cut < len(lines[-1]) else {})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], of.NO_ANSWER),
        ({"draftworks_request": 2}, of.OTHER_SCHEMA),
        ({"draftworks_request": 1, "id": 3}, of.OTHER_SCHEMA),
        (ASKED, of.NO_ANSWER),
        ({"request": ASKED}, of.NO_ANSWER),
        ({"request": ASKED, "response": None}, of.NO_ANSWER),
        ({"event": "request.received.openai", "obj": ASKED}, of.NO_ANSWER),
        ({"request": ASKED, "response": vllm_answer(created=None)}, of.NO_TIME),
        ({"request": ASKED, "response": vllm_answer(metrics=None)}, of.NO_COUNTS),
        ({"request": ASKED, "response": vllm_answer(model="gpt")}, of.OTHER_MODEL),
        ({"request": {**ASKED, "n": 2}, "response": vllm_answer(metrics=None)}, of.SEVERAL),
        (
            {"request": ASKED, "response": vllm_answer(metrics={"speculative_decoding": {"num_spec_steps": 1}})},
            of.CONTRADICTORY,
        ),
        (sglang_finished(finish_reason={"type": "abort"}), of.ABORTED),
    ],
)
def test_a_line_without_a_request_that_compares_is_told_by_its_reason(tmp_path: Path, row: Any, reason: str):
    assert read_rows(tmp_path, row).apart == {reason: 1}


def test_a_line_that_is_too_long_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(of, "MAX_LINE_MB", 1e-3)
    found = read_rows(tmp_path, make_request(1).to_json(), {"text": "a" * 2000})
    assert (len(found.requests["eagle3"]), found.apart) == (1, {of.TOO_LONG: 1})


def list_slices(found: LogReading) -> dict[str, str]:
    table = found.requests["eagle3"]
    return {name: table.values[name][codes[0]] for name, codes in table.columns.items()}


@pytest.mark.parametrize(
    "row",
    [
        {"request": ASKED, "response": vllm_answer(), "server": "front"},
        {"request": {"body": ASKED}, "response": {"status_code": 200, "body": vllm_answer()}, "server": "front"},
        {**ASKED, **vllm_answer(), "server": "front"},
        {
            "request": ASKED,
            "server": "front",
            "response": [vllm_answer(metrics=None, usage=None), vllm_answer(choices=[])],
        },
    ],
)
def test_a_gateways_lines_have_the_slices_of_a_report_and_the_counts(tmp_path: Path, row: dict[str, Any]):
    found = read_rows(tmp_path, row, source_field="app")
    table = found.requests["eagle3"]
    assert (found.apart, table.passes[0], table.accepted[0], table.drafted[0], table.emitted[0]) == ({}, 4, 3, 8, 7)
    assert table.prompt[0] == shorten(digest_messages([("user", "What is the use of it")]))
    assert list_slices(found) == {
        "source": "chat",
        "language": "en",
        "prompt_length": "under 500",
        "thinking": "default",
        "turn": "1",
        "temperature": "0",
        "server": "front",
    }


def test_sglangs_own_log_has_requests_that_have_ended(tmp_path: Path):
    write_rows(tmp_path / "log.jsonl", [])
    (tmp_path / "log.jsonl").write_bytes(
        b"[2026-06-01 00:00:00] " + write_rows(tmp_path / "x", [sglang_finished()]).read_bytes()
    )
    found = read(tmp_path)
    table = found.requests["eagle3"]
    assert (table.passes[0], table.accepted[0], table.emitted[0]) == (4, 3, 7)
    assert table.prompt[0] == shorten(token_digest([1, 2, 3]))
    assert list_slices(found)["server"] == of.NOT_NAMED


def ids_of(times: Sequence[float]) -> list[float]:
    return [time - BEGIN for time in times]


def test_of_many_lines_the_last_of_the_newest_files_are_read(tmp_path: Path):
    for name, first in (("b", 0), ("a", 10)):  # the file whose name is first was written last
        path = write_log(tmp_path / f"{name}.jsonl", [make_request(first + n) for n in range(5)])
        os.utime(path, (BEGIN + first, BEGIN + first))
    found = read(tmp_path, max_lines=7)
    assert (found.files, found.lines, found.skipped) == (2, 7, 3)
    assert ids_of(found.requests["eagle3"].time) == [3, 4, 10, 11, 12, 13, 14]


def test_a_pattern_without_a_file_is_told_and_the_others_are_read(tmp_path: Path):
    write_log(tmp_path / "a.jsonl", [PLAIN])
    found = read(tmp_path, "a.jsonl", "later/*.jsonl")
    assert len(found.requests["eagle3"]) == 1
    assert [each.split(" below")[0] for each in found.remarks] == ["no file matches 'later/*.jsonl'"]


def test_a_column_with_very_many_values_keeps_the_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(of.Codes, "__init__", lambda self, most=2: self.__dict__.update(most=most, numbers={}))
    write_log(tmp_path / "a.jsonl", [make_request(n, source=f"s{n}") for n in range(5)])
    assert read(tmp_path).requests["eagle3"].values["source"] == ["s0", "s1", of.REST]
