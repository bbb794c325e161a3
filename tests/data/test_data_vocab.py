"""Properties of the draft vocabulary.
No prompt is both held out and trained on, in whatever way it comes twice.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from served_toys import body, message, served, write_log

from draftworks.config.registry_files import DatasetSpec, DataSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.conversations import Conversation, Turn, read_conversations
from draftworks.data.prepare import SliceShares, prepare_conversations, prepare_eval_set, prepare_mix
from draftworks.data.split import is_held_out
from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.data.vocab import VocabMapping, build_vocab_mapping, count_supervised_tokens
from draftworks.errors import ConfigError, DataError, StoreError

counts_and_size = st.lists(st.integers(0, 5), min_size=1, max_size=60).flatmap(
    lambda counts: st.tuples(st.just(np.array(counts)), st.integers(1, len(counts)))
)


@given(counts_and_size)
def test_d2t_and_t2d_name_the_same_ids_in_ascending_order(case):
    counts, size = case
    mapping = build_vocab_mapping(counts, size)
    assert mapping.d2t.dtype == np.int64
    assert mapping.t2d.dtype == np.bool_
    assert len(mapping.d2t) == size == mapping.t2d.sum()
    np.testing.assert_array_equal(mapping.target_ids, np.flatnonzero(mapping.t2d))


@given(counts_and_size)
def test_kept_ids_are_those_of_the_reference_definition(case):
    """Most common first, padded with ids of range(V_d) at count 0; ties here by lowest id."""
    counts, size = case
    counter = Counter({token: int(n) for token, n in enumerate(counts) if n})
    if len(counter) < size:
        counter.update({token: 0 for token in range(size) if token not in counter})
    expected = sorted(counter, key=lambda token: (-counter[token], token))[:size]
    assert build_vocab_mapping(counts, size).target_ids.tolist() == sorted(expected)


@given(counts_and_size)
def test_coverage_is_the_best_of_any_set_of_that_size_and_grows_with_it(case):
    counts, size = case
    mapping = build_vocab_mapping(counts, size)
    best = np.sort(counts)[::-1][:size].sum() / max(counts.sum(), 1)
    assert mapping.measure_coverage(counts) == pytest.approx(best)


@given(counts_and_size)
def test_saved_mapping_is_loaded_as_it_was(tmp_path_factory, case):
    path = tmp_path_factory.mktemp("vocab") / "vocab.safetensors"
    mapping = build_vocab_mapping(*case)
    mapping.save(path)
    loaded = VocabMapping.load(path)
    np.testing.assert_array_equal(loaded.d2t, mapping.d2t)
    np.testing.assert_array_equal(loaded.t2d, mapping.t2d)
    assert loaded.digest == mapping.digest
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("size", [0, 5])
def test_a_draft_vocabulary_larger_than_the_targets_or_empty_is_an_error(size):
    with pytest.raises(ConfigError, match=f"draft_vocab_size {size} .*vocabulary of 4"):
        build_vocab_mapping(np.ones(4), size)


def test_only_supervised_tokens_are_counted(tmp_path):
    rows = [
        TokenRow("a", np.array([1, 2, 2, 3], np.int32), np.array([0, 1, 1, 1], bool)),
        TokenRow("b", np.array([2, 0], np.int32), np.array([1, 0], bool)),
    ]
    write_tokens(tmp_path, rows)
    tokens = TokenizedSet.open(tmp_path)
    assert count_supervised_tokens(tokens, 5).tolist() == [0, 0, 3, 1, 0]
    with pytest.raises(DataError, match="vocabulary 3 ids: it belongs to another target"):
        count_supervised_tokens(tokens, 3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": np.zeros(2, np.int64)}, "expected the tensors d2t and t2d"),
        ({"d2t": np.zeros(2, np.int32), "t2d": np.ones(2, bool)}, "expected d2t as int64"),
        ({"d2t": np.zeros((2, 1), np.int64), "t2d": np.ones(2, bool)}, "of one dimension"),
        ({"d2t": np.array([0, 1]), "t2d": np.array([True, True, False])}, "different tokens"),
        ({"d2t": np.array([0, 9]), "t2d": np.array([True, True, False])}, "different tokens"),
    ],
)
def test_an_inconsistent_mapping_is_a_store_error(tmp_path, tensors, message):
    path = tmp_path / "vocab.safetensors"
    save_file(tensors, path)
    with pytest.raises(StoreError, match=message):
        VocabMapping.load(path)


def test_a_missing_or_truncated_mapping_is_a_store_error(tmp_path):
    path = tmp_path / "vocab.safetensors"
    with pytest.raises(StoreError, match="cannot be read"):
        VocabMapping.load(path)
    build_vocab_mapping(np.arange(100), 50).save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StoreError, match="cannot be read"):
        VocabMapping.load(path)


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
