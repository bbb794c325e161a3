"""No prompt is both held out and trained on, in whatever way it comes twice."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served_toys import body, message, served, write_log

from draftworks.config.registry_files import DatasetSpec, DataSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.conversations import Conversation, Turn, read_conversations
from draftworks.data.prepare import SliceShares, prepare_conversations, prepare_eval_set, prepare_mix
from draftworks.data.split import is_held_out
from draftworks.data.tokenized import TokenizedSet, TokenRow

DATA = DataSpec(held_out_share=0.3)
CHATS = DatasetSpec(name="chats", files=["*.jsonl"])


def asked(turns: list[dict[str, Any]]) -> tuple[str, ...]:
    """System and first user turn as a reader compares them."""
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    first = next(turn["content"] for turn in turns if turn["role"] == "user")
    return tuple(" ".join(unicodedata.normalize("NFC", text).lower().split()) for text in (*system, first))


def prompts_of(folder: Path) -> set[tuple[str, ...]]:
    turns = ([{"role": turn.role, "content": turn.content} for turn in one.turns] for one in read_conversations(folder))
    return {asked(each) for each in turns}


def exchange(question: str, *more: str) -> list[dict[str, Any]]:
    return [message("user", question), *(message(("assistant", "user")[at % 2], text) for at, text in enumerate(more))]


def respell(text: str, way: int) -> str:
    ways = (str, str.upper, lambda one: unicodedata.normalize("NFD", one), lambda one: f"  {one.replace(' ', '  ')}\n")
    return ways[way % len(ways)](text)


WAYS = {
    "several answers": lambda n, k: exchange(f"Question {n}?", f"Answer {k} to {n}."),
    "follow-ups": lambda n, k: exchange(f"Question {n}?", "Yes.", *[f"and {k}?", "No."] * (k % 3)),
    "other spellings": lambda n, k: exchange(respell(f"Où est la forêt {n}?", k), f"Là {k}."),
    "a greeting before": lambda n, k: [
        *[message("assistant", "Hello.")] * (k % 2),
        *exchange(f"Question {n}?", f"{k}"),
    ],
    "one system prompt": lambda n, k: [message("system", f"You  are {n}"), *exchange(f"What is {n}?", f"It is {k}.")],
    "a developer's words": lambda n, k: [
        message(("system", "developer")[k % 2], "Be brief"),
        *exchange(f"{n}?", f"{k}"),
    ],
}


def write_rows(path: Path, rows: list[list[dict[str, Any]]], key: str = "messages") -> None:
    path.write_text("".join(json.dumps({key: row}) + "\n" for row in rows))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("files", [1, 4])
def test_rows_of_one_prompt_are_on_one_side(way, files, tmp_path: Path, tiny_target: TargetFiles):
    for file in range(files):
        rows = [WAYS[way](n, k) for n in range(60) for k in range(4) if files == 1 or k == file]
        write_rows(tmp_path / f"{file}.jsonl", rows)
    summary = prepare_conversations(CHATS, DATA, tmp_path, tiny_target, tmp_path / "out")
    trained, held = (prompts_of(tmp_path / "out" / part) for part in ("train", "heldout"))
    assert not trained & held
    assert len(trained) + len(held) == summary["prompts"] == 60
    assert summary["train"] + summary["heldout"] == summary["conversations"]
    assert summary["sharing_a_prompt"] == summary["conversations"] > 60


def test_another_system_prompt_is_another_prompt(tmp_path: Path, tiny_target: TargetFiles):
    rows = [[message("system", f"You are {n}."), *exchange("Who are you?", f"I am {n}.")] for n in range(80)]
    write_rows(tmp_path / "a.jsonl", rows)
    summary = prepare_conversations(CHATS, DATA, tmp_path, tiny_target, tmp_path / "out")
    assert (summary["prompts"], summary["sharing_a_prompt"]) == (80, 0)
    assert summary["heldout"] > 5


@pytest.mark.parametrize("shares", [None, SliceShares("thinking", {"on": 0.5, "off": 0.5})])
def test_what_a_mix_trains_on_is_held_out_of_none_of_its_sets(shares, tmp_path: Path, tiny_target, request):
    if shares is not None:
        from thinking import thinking_target

        (tmp_path / "thinking").mkdir()
        tiny_target = thinking_target(tiny_target, tmp_path / "thinking")
    write_rows(tmp_path / "a.jsonl", [exchange(f"What is {n}?", "so", "and then?", "so too") for n in range(60)])
    write_log(tmp_path / "a.log", [body(f"WHAT is {n}?") for n in range(60)])
    prepare_mix([CHATS, served()], None, DATA, tmp_path, tiny_target, tmp_path / "mix", shares)
    prepare_eval_set(served(), None, DATA, tmp_path, tiny_target, tmp_path / "served", part="held_out")
    trained = prompts_of(tmp_path / "mix" / "train")
    assert not trained & prompts_of(tmp_path / "mix" / "heldout")
    assert not trained & prompts_of(tmp_path / "served" / "all")
    assert len(prompts_of(tmp_path / "served" / "all")) > 5


def test_token_rows_of_one_prompt_are_on_one_side(tmp_path: Path, tiny_target: TargetFiles):
    rows = [
        {"input_ids": [5, 6, n, 9, k], "loss_mask": [0, 0, 0, k % 2, 1]} for n in range(10, 70) for k in range(10, 14)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_conversations(CHATS, DATA, tmp_path, tiny_target, tmp_path / "out")
    parts = [TokenizedSet.open(tmp_path / "out" / part) for part in ("train", "heldout")]
    keys = [
        {tuple(row.input_ids[: row.loss_mask.argmax()]) for row in map(part.row, range(len(part)))} for part in parts
    ]
    assert not keys[0] & keys[1]
    assert len(keys[0]) + len(keys[1]) == 120  # 60 prompts that end before the fourth token, 60 after it


def test_token_rows_without_a_prompt_are_told_apart_by_all_their_ids():
    rows = [TokenRow(str(n), *_arrays([n, 7], [1, 1])) for n in range(400)]
    assert len({row.prompt_key for row in rows}) == 400


def _arrays(ids: list[int], mask: list[int]) -> tuple[Any, Any]:
    import numpy as np

    return np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(str.strip)
ascii_words = st.text(st.characters(max_codepoint=126, min_codepoint=32), min_size=1, max_size=20).filter(str.strip)


@given(words, words, st.lists(words, max_size=3))
def test_the_key_is_of_system_and_first_question_alone(system, question, rest):
    turns = [Turn("system", system), Turn("user", question)]
    more = [Turn(("assistant", "user")[at % 2], text) for at, text in enumerate(rest)]
    key = Conversation.of(turns).prompt_key
    assert Conversation.of([*turns, *more]).prompt_key == key
    respelt = unicodedata.normalize("NFD", question).replace(" ", " \u00a0\n")
    assert Conversation.of([turns[0], Turn("user", f" {respelt}\t")]).prompt_key == key
    assert Conversation.of([Turn("user", question)]).prompt_key != key


@given(ascii_words, ascii_words)
def test_keys_differ_where_more_than_case_and_space_does(one, other):
    same = " ".join(one.lower().split()) == " ".join(other.lower().split())
    first, second = (Conversation.of([Turn("user", text)]).prompt_key for text in (one, other))
    assert (first == second) == same
    assert Conversation.of([Turn("user", one.swapcase())]).prompt_key == first


def test_keys_are_the_same_in_every_process_and_release():
    """Values that were computed once: a prompt that moves between training and held-out data spoils every comparison."""
    keys = [
        Conversation.of([Turn("user", "What is 2+2?")]).prompt_key,
        Conversation.of(
            [Turn("system", "Be brief."), Turn("user", "Où est  la forêt?"), Turn("assistant", "Là.")]
        ).prompt_key,
        Conversation.of([Turn("assistant", "Hi"), Turn("user", "聊天")]).prompt_key,
        TokenRow("0f1e", *_arrays([5, 6, 7, 8], [0, 0, 1, 1])).prompt_key,
    ]
    assert [key[:16] for key in keys] == [
        "75cb9e278b21bec2",
        "5642aa8078e2456a",
        "4238aa48f33e9e09",
        "f1833c11f8858560",
    ]
    assert [is_held_out(key, 0.5) for key in keys] == [False, True, True, True]
