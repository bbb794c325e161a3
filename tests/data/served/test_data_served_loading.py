"""Served prompts as a data set: every shape reads alike, nothing of a row leaks, and its origin is recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served_toys import SECRETS, answer, body, message, served, shapes_of, write_log

from draftworks.data.conversations import Conversation, Turn
from draftworks.data.served.loading import drop_beginnings, load_served
from draftworks.data.sources import digest_dataset
from draftworks.errors import ConfigError, DataError
from draftworks.storage.identity import FileDigests, canonical_json

NEEDLE = "violet armadillo"
texts = st.text(min_size=1, max_size=20).filter(str.strip).filter(lambda text: text.isprintable())


def load(folder: Path, share: float = 1.0, **options):
    return load_served(served(**options), folder, folder / "out", share)


def questions(loaded) -> list[str]:
    return [one.turns[0].content for one in loaded.conversations]


@given(asked=st.lists(texts, min_size=1, max_size=3))
def test_every_shape_of_a_request_gives_the_same_prompt(tmp_path_factory, asked):
    found = set()
    for name, row in shapes_of(body(*asked)).items():
        folder = tmp_path_factory.mktemp("served")
        write_log(folder / "a.log", [row], prefix="[2026-01-31 12:00:00] " if name == "sglang" else "")
        [one] = load(folder, mask=[]).conversations
        found.add(one)
        assert one.turns[-1] == Turn("assistant", ""), "the target is to answer, not the server"
        assert set(one.columns) == {"language", "prompt_length", "thinking", "source"}
    [only] = found
    assert [turn.content for turn in only.turns if turn.role == "user"] == asked


def test_other_events_of_a_log_are_passed_over_and_cut_requests_rejected(tmp_path):
    cut = "a" * 1024 + "..." + "b" * 1024
    rows = [
        shapes_of(body("whole"))["sglang"],
        {"event": "request.finished", "obj": {"text": "rendered"}, "out": {}},
        shapes_of(body(cut))["sglang"],
    ]
    write_log(tmp_path / "a.log", rows)
    loaded = load(tmp_path)
    assert questions(loaded) == ["whole"]
    assert (loaded.counts["other_events"], loaded.counts["rejected"]) == (1, 1)
    write_log(tmp_path / "a.log", [body(cut)])
    assert questions(load(tmp_path)) == [cut]  # in another shape it is text like any other


BAD_ROWS = [
    "not json " + NEEDLE,
    [NEEDLE],
    {"prompt": NEEDLE},
    {"messages": NEEDLE},
    {"messages": [NEEDLE]},
    {"messages": [message(NEEDLE, "a")]},
    {"messages": [message("user", {"a": NEEDLE})]},
    {"messages": [message("user", [{"type": "image_url", "image_url": NEEDLE}])]},
    {"messages": [message("system", NEEDLE)]},
    {"messages": [message("user", NEEDLE), message("assistant", NEEDLE)]},
    {"messages": [{**message("assistant", None), "tool_calls": [{"id": NEEDLE}]}, message("user", NEEDLE)]},
    {"messages": [message("user", " ")], "note": NEEDLE},
    {"messages": [message("user", "\ud800" + NEEDLE)]},
    '{"messages": [{"role": "user", "content": "' + NEEDLE,
    "[" * 5000 + NEEDLE,
]


def test_bad_rows_are_rejected_by_line_without_a_word_of_them(tmp_path):
    write_log(tmp_path / "a.log", [body("good"), *BAD_ROWS])
    loaded = load(tmp_path)
    quarantine = (tmp_path / "out" / "quarantine.jsonl").read_text()
    assert loaded.counts["rejected"] == len(BAD_ROWS)
    assert [json.loads(line)["line"] for line in quarantine.splitlines()] == list(range(2, len(BAD_ROWS) + 2))
    with pytest.raises(DataError, match="rows rejected") as caught:
        load(tmp_path, 0.1)
    for said in (quarantine, canonical_json(loaded.lineage), canonical_json(loaded.counts), str(caught.value)):
        assert NEEDLE not in said


@pytest.mark.parametrize("kind", SECRETS)
def test_a_row_with_a_secret_is_masked_or_left_out_or_refused_and_never_shown(tmp_path, kind):
    secret = SECRETS[kind]
    write_log(tmp_path / "a.log", [body("good"), body(f"why does {secret} not work?"), body("a", f"and\n{secret}")])
    masked = load(tmp_path)
    assert masked.counts["dropped_for_secrets"] == 0
    assert (masked.lineage["masked"], masked.lineage["left_out"]) == ({kind: 2}, {})
    assert not any(secret in turn.content for one in masked.conversations for turn in one.turns)
    assert any("[SECRET]" in turn.content for one in masked.conversations for turn in one.turns)
    dropped = load(tmp_path, mask=[])
    assert questions(dropped) == ["good"]
    assert (dropped.lineage["masked"], dropped.lineage["left_out"]) == ({}, {kind: 2})
    with pytest.raises(DataError, match=f"a.log:2: the row still holds a secret, {kind}, after") as caught:
        load(tmp_path, mask=[], on_secret="refuse")
    said = [str(caught.value), canonical_json(dropped.lineage), (tmp_path / "out" / "quarantine.jsonl").read_text()]
    assert not any(secret.split()[-1] in each for each in said)


def test_ordinary_text_is_no_secret(tmp_path):
    asked = [
        "the sk- prefix",
        "AKIA is a prefix",
        "task-force-and-more-of-the-same",
        "a -----BEGIN CERTIFICATE-----",
        "v1.2.3.4",
    ]
    asked += ["https://example.org/a:b@c", "password: hunter2", "hf_hub_download(repo_id)", "1.2.3"]
    write_log(tmp_path / "a.log", [body(one) for one in asked])
    assert questions(load(tmp_path, mask=["email", "ip", "phone", "secret"])) == asked


def test_personal_data_is_masked_where_asked(tmp_path):
    write_log(tmp_path / "a.log", [body("mail a.b@example.org, call +49 30 1234567, ping 10.0.0.1")])
    masked = load(tmp_path, mask=["email", "phone", "ip"])
    assert questions(masked) == ["mail [EMAIL], call [PHONE], ping [IP]"]
    assert masked.lineage["masked"] == {"email": 1, "ip": 1, "phone": 1}
    assert questions(load(tmp_path, mask=[])) == ["mail a.b@example.org, call +49 30 1234567, ping 10.0.0.1"]


@given(chats=st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), min_size=1, max_size=8))
def test_only_the_longest_request_of_a_chat_is_kept(chats):
    asked = {tuple(chat) for chat in chats}
    made = [
        Conversation.of([turn for one in chat for turn in (Turn("user", one), Turn("assistant", ""))]) for chat in asked
    ]
    kept = {tuple(turn.content for turn in one.turns if turn.role == "user") for one in drop_beginnings(made)}
    assert kept == {chat for chat in asked if not any(o != chat and o[: len(chat)] == chat for o in asked)}


def test_thinking_and_source_become_columns(tmp_path):
    rows = [
        body("a", chat_template_kwargs={"enable_thinking": True}, metadata={"app": "search"}),
        body("b", chat_template_kwargs={"thinking": False}),
        body("c", reasoning_effort="none", metadata={"app": 7}),
        {"request": body("d"), "response": {"choices": [{"message": {"reasoning_content": "hm", "content": "x"}}]}},
        body("e"),
    ]
    write_log(tmp_path / "a.log", rows)
    columns = [one.columns for one in load(tmp_path, source_field="metadata.app").conversations]
    assert [one["thinking"] for one in columns] == ["on", "off", "off", "on", "default"]
    assert [one["source"] for one in columns] == ["search", "served", "7", "served", "served"]


def test_the_lineage_names_files_span_and_counts(tmp_path):
    rows = [
        {"timestamp": "2026-01-31T12:00:00+00:00", "request": body("a")},
        {"created": 1_700_000_000_000, "request": body("b")},
        {"ts": float(10**300), "request": body("c")},
        {"request": body("d")},
    ]
    write_log(tmp_path / "logs" / "a.log", rows)
    lineage = load(tmp_path, files="logs/*").lineage
    assert lineage["files"] == {"logs/a.log": FileDigests().of_file(tmp_path / "logs" / "a.log")}
    assert (lineage["from"], lineage["to"]) == ("2023-11-14T22:13:20+00:00", "2026-01-31T12:00:00+00:00")
    assert lineage["counts"]["rows"] == 4
    assert lineage["redaction"] is None


def hook(tmp_path: Path, code: str, **more) -> dict:
    (tmp_path / "redact.py").write_text(
        f"import json, sys, time\nrows = [json.loads(line) for line in sys.stdin]\n{code}"
    )
    return {"redaction": {"command": [sys.executable, "redact.py"], **more}}


SHOUT = """
for row in rows:
    for each in row["messages"]:
        each["content"] = each["content"].upper()
    print(json.dumps(row if "drop" not in json.dumps(row).lower() else None))
"""


def test_a_command_redacts_rows_in_order_in_calls_of_any_size(tmp_path):
    write_log(tmp_path / "a.log", [body(f"q{number}") for number in range(7)] + ["bad", body("drop me")])
    for rows_per_call in (1, 3, 1000):
        loaded = load(tmp_path, **hook(tmp_path, SHOUT, rows_per_call=rows_per_call))
        assert questions(loaded) == [f"Q{number}" for number in range(7)]
        assert (loaded.counts["dropped_by_redaction"], loaded.counts["rejected"]) == (1, 1)


def test_a_function_redacts_in_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "house_redaction.py").write_text(
        "def redact(rows):\n    print('noise')\n    return [{**row, 'source': 'hidden'} for row in rows]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    write_log(tmp_path / "a.log", [body("a"), body("b")])
    loaded = load(tmp_path, redaction={"function": "house_redaction:redact"})
    assert [one.columns["source"] for one in loaded.conversations] == ["hidden", "hidden"]
    with pytest.raises(ConfigError, match="no_such_module is not installed"):
        digest_dataset(served(redaction={"function": "no_such_module:redact"}), tmp_path, FileDigests())


@pytest.mark.parametrize(
    ("code", "more", "match"),
    [
        (f"sys.exit('{NEEDLE}')", {}, "exit code 1"),
        ("print('{}')", {}, "expected 2 lines"),
        (f"print('{NEEDLE}'); print('null')", {}, "line 1 of a call's output is not JSON"),
        ('print(json.dumps(rows[0])); print(\'{"messages": [], "source": "a"}\')', {}, "the same roles"),
        ("[print(json.dumps({**row, 'source': 'x' * 999})) for row in rows]", {}, "the key source"),
        ("time.sleep(60)", {"timeout_s": 0.5}, "not done within 0.5 s"),
        ("[print('x' * 1000) for _ in range(5000)]; time.sleep(60)", {}, "more than .* bytes of output"),
    ],
)
def test_a_hook_that_fails_ends_the_run_with_one_error_that_quotes_nothing(tmp_path, code, more, match):
    write_log(tmp_path / "a.log", [body(NEEDLE), body("b")])
    with pytest.raises(DataError, match=match) as caught:
        load(tmp_path, **hook(tmp_path, code, **more))
    assert NEEDLE not in str(caught.value)


def test_a_secret_that_a_hook_brings_in_is_found(tmp_path):
    write_log(tmp_path / "a.log", [body("a"), body("b")])
    code = (
        "rows[0]['messages'][0]['content'] = "
        + repr(SECRETS["github_token"])
        + "\n[print(json.dumps(r)) for r in rows]"
    )
    assert load(tmp_path, **hook(tmp_path, code)).counts["dropped_for_secrets"] == 1


def test_the_version_of_the_data_is_that_of_contents_redaction_and_patterns(tmp_path):
    write_log(tmp_path / "a.log", [body("a")])
    options = hook(tmp_path, SHOUT)

    def version(**more) -> str:
        return digest_dataset(served(**more), tmp_path, FileDigests())

    before = version(**options)
    assert version(**options, max_rows=5, max_line_mb=1) == before
    assert len({before, version(), version(mask=[]), version(on_secret="refuse"), version(source_field="a")}) == 5
    hook(tmp_path, SHOUT + "\n")
    assert version(**options) != before
    (tmp_path / "a.log").rename(tmp_path / "b.log")
    changed = version(**options)
    write_log(tmp_path / "b.log", [body("b")])
    assert version(**options) != changed


def test_limits_of_rows_and_lines(tmp_path):
    write_log(tmp_path / "a.log", [body("a"), body("b" * 2**20), body("c")])
    loaded = load(tmp_path, max_line_mb=0.5)
    assert questions(loaded) == ["a", "c"]
    with pytest.raises(DataError, match="more than 2 rows"):
        load(tmp_path, max_rows=2)


def test_no_prompt_at_all_is_an_error(tmp_path):
    write_log(tmp_path / "a.log", [{"event": "request.finished"}])
    with pytest.raises(DataError, match="hold no logged request"):
        load(tmp_path)
    write_log(tmp_path / "a.log", [body(SECRETS["api_key"]), {"request": body(SECRETS["slack_token"]), **answer()}])
    with pytest.raises(DataError, match="no row is left of 2: 0 rejected, 2 with a secret"):
        load(tmp_path, mask=[])
