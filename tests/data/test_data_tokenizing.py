"""Tokenizing conversations: nothing depends on the number of processes, nothing is lost silently.
Tokenized sets: what was written is there, in any order under the same digest, without copies.
Token rows: their digest is the one that feature keys are made of.
Spans of the assistant in rendered text.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import wait_until_ended

from draftworks.config.registry_files import DataSpec
from draftworks.data.chat import (
    EndOfTurn,
    fill_empty_thought,
    find_end_of_thought,
    find_last_words,
    find_leading_thought,
    find_open_thought,
    make_end_of_thought,
    measure_common_prefix,
)
from draftworks.data.conversations import ANSWER, Conversation, Turn
from draftworks.data.tokenized import TokenizedSet, TokenRow, cut_to_length, write_tokens
from draftworks.data.tokenizing import cut_rows, tokenize
from draftworks.errors import ConfigError, DataError, StoreError
from draftworks.storage.identity import token_digest


def spoken(n: int, words: int = 3) -> Conversation:
    return Conversation.of([Turn("user", f"Question {n}?"), Turn("assistant", "answer " * words)], {"task": "qa"})


def data(**values) -> DataSpec:
    return DataSpec(**{"workers": 1, **values})


@pytest.mark.slow
def test_result_does_not_depend_on_the_number_of_processes_nor_on_the_calling_thread(tiny_target, tmp_path):
    conversations = [spoken(n, 1 + n % 40) for n in range(600)]
    alone = tokenize(conversations, tiny_target, data(workers=1), 64)
    together = []
    arguments = (conversations, tiny_target, data(workers=2), 64)
    thread = threading.Thread(target=lambda: together.append(tokenize(*arguments, per_process=200)))
    thread.start()
    thread.join()
    digests = [write_tokens(tmp_path / str(n), each.rows)["digest"] for n, each in enumerate((alone, *together))]
    assert digests[0] == digests[1]
    assert [row.sample_id for row in together[0].rows] == [row.sample_id for row in alone.rows]
    assert together[0].counts() == alone.counts()
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_own_answers_are_learnt_without_the_question_that_none_follows(tiny_target):
    turns = [Turn("user", "a"), Turn("assistant", "It is b.")]
    open_end = Conversation.of([*turns, Turn("user", "and c?"), ANSWER])
    (row,) = tokenize([open_end], tiny_target, data(), 512).rows
    (plain,) = tokenize([Conversation.of(turns)], tiny_target, data(), 512).rows
    assert row.supervised == plain.supervised
    assert row.input_ids[: len(plain)].tolist() == plain.input_ids.tolist()
    with pytest.raises(DataError, match="it has no answer for responses.mode passthrough"):
        tokenize([Conversation.of([turns[0], ANSWER])], tiny_target, data(), 512)


def test_cut_samples_and_tokens_are_counted_and_reported(tiny_target, tmp_path):
    conversations = [spoken(1), spoken(2, words=50), spoken(3, words=100)]
    full = tokenize(conversations, tiny_target, data(), 512)
    cut = tokenize(conversations, tiny_target, data(), 40)
    assert (full.cut_samples, full.cut_supervised_tokens) == (0, 0)
    assert cut.cut_samples == 2
    supervised = [sum(row.supervised for row in each.rows) for each in (full, cut)]
    assert cut.cut_supervised_tokens == supervised[0] - supervised[1] > 0
    assert all(np.array_equal(a.input_ids[:40], b.input_ids) for a, b in zip(full.rows, cut.rows))
    write_tokens(tmp_path, cut.rows, cut.counts())
    summary = TokenizedSet.open(tmp_path).summary
    assert (summary["cut_samples"], summary["longest"]) == (2, 40)
    assert summary["cut_supervised_tokens"] == cut.cut_supervised_tokens
    assert summary["supervised_share"] == pytest.approx(cut.supervised_share)


def test_a_sample_without_supervised_tokens_within_the_limit_is_rejected_with_a_reason(tiny_target, tmp_path):
    long_question = Conversation.of([Turn("user", "why " * 100), Turn("assistant", "because")])
    result = tokenize([spoken(1), long_question], tiny_target, data(max_rejected_share=0.5), 30)
    assert [row.sample_id for row in result.rows] == [spoken(1).id]
    assert result.rejected[0].sample_id == long_question.id
    assert result.rejected[0].reason.startswith("no supervised token in the first 30 of")
    summary = write_tokens(tmp_path, result.rows, result.counts())
    assert summary["rejected"] == 1
    assert list(summary["rejected_reasons"].values()) == [1]


def test_too_many_rejected_conversations_are_an_error_that_says_why(tiny_target):
    questions = [Conversation.of([Turn("user", str(n)), Turn("user", "b")]) for n in range(3)]
    with pytest.raises(DataError, match=r"3 of 4 .*\(75\.0%\), max_rejected_share allows 5\.0%(.|\n)*it has no answer"):
        tokenize([*questions, spoken(1)], tiny_target, data(), 64)
    with pytest.raises(DataError, match="1 of 1 conversations give no sample"):
        tokenize(questions[:1], tiny_target, data(max_rejected_share=1), 64)
    with pytest.raises(DataError, match="no conversation to tokenize"):
        tokenize([], tiny_target, data(), 64)


def test_a_limit_longer_than_the_models_context_is_an_error_before_any_work(tiny_target):
    for call in (tokenize, cut_rows):
        with pytest.raises(ConfigError, match=r"tiny: max_length 513 is longer than the model's context of 512"):
            call(iter(()), tiny_target, data(), 513)


def test_an_unusable_tokenizer_is_one_error_and_not_a_rejection_of_every_row(tiny_target, tmp_path):
    broken = tiny_target.model_copy(update={"tokenizer": str(tmp_path / "nowhere")})
    with pytest.raises(DataError, match="^target tiny: the tokenizer's folder .*nowhere does not exist"):
        tokenize([spoken(1)], broken, data(max_rejected_share=1), 64)


def test_progress_counts_up_to_all(tiny_target):
    lines: list[str] = []
    tokenize([spoken(n) for n in range(300)], tiny_target, data(), 64, progress=lines.append)
    assert lines == ["tokenized 256 of 300 conversations", "tokenized 300 of 300 conversations"]


def test_columns_and_ids_of_the_conversations_stay_with_the_samples(tiny_target):
    (row,) = tokenize([spoken(1)], tiny_target, data(), 64).rows
    assert (row.sample_id, row.columns) == (spoken(1).id, {"task": "qa"})


def test_pretokenized_rows_are_cut_and_rejected_by_the_same_rules(tiny_target):
    rows = [
        TokenRow("kept", np.arange(4, dtype=np.int32), np.array([0, 1, 1, 1], bool)),
        TokenRow("late", np.arange(4, dtype=np.int32), np.array([0, 0, 0, 1], bool)),
    ]
    result = cut_rows(rows, tiny_target, data(max_rejected_share=0.5), 3)
    assert [(row.sample_id, len(row)) for row in result.rows] == [("kept", 3)]
    assert (result.cut_samples, result.cut_supervised_tokens) == (1, 1)
    assert [each.sample_id for each in result.rejected] == ["late"]


ORPHANS = """
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from os import getpid
from draftworks.data.tokenizing import enter_worker

pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=enter_worker)
print(pool.submit(getpid).result(), flush=True)
pool.submit(time.sleep, 60).result()
"""


def test_tokenizer_processes_end_when_their_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until_ended(worker)


def test_data_room_imports_neither_torch_nor_transformers():
    modules = ["datasets", "tokenized", "vocab", "chat"]
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module('draftworks.data.' + m)\n"
    code += "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


tokens = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=8)


def row(sample_id: str, pairs: list[tuple[int, bool]], **columns) -> TokenRow:
    ids, mask = ([pair[n] for pair in pairs] for n in (0, 1))
    return TokenRow(sample_id, np.array(ids, np.int32), np.array(mask, bool), columns)


sets = st.dictionaries(st.text(alphabet="abcdef0123456789", min_size=1), tokens, min_size=1, max_size=6).map(
    lambda found: [row(sample_id, pairs, n=len(pairs)) for sample_id, pairs in found.items()]
)
ONE = [row("a", [(1, True), (2, False)]), row("b", [(3, True)])]


def same(one: TokenRow, other: TokenRow) -> bool:
    return (
        one.sample_id == other.sample_id
        and np.array_equal(one.input_ids, other.input_ids)
        and np.array_equal(one.loss_mask, other.loss_mask)
        and dict(one.columns) == dict(other.columns)
    )


@given(sets)
def test_written_rows_are_read_as_they_were(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("tokens")
    summary = write_tokens(folder, rows)
    opened = TokenizedSet.open(folder)
    assert len(opened) == len(rows) == summary["samples"]
    assert all(same(opened.row(n), each) and same(opened.by_id(each.sample_id), each) for n, each in enumerate(rows))
    assert opened.lengths.tolist() == [len(each) for each in rows]
    assert opened.sample_ids == tuple(each.sample_id for each in rows)
    assert opened.columns == [dict(each.columns) for each in rows]
    assert summary["tokens"] == len(opened.flat_ids) == sum(map(len, rows))
    assert summary["supervised_tokens"] == opened.flat_mask.sum()
    assert summary["longest"] == max(map(len, rows))


@given(sets, st.randoms())
def test_digest_is_of_the_content_whatever_the_order(tmp_path_factory, rows, random):
    folder = tmp_path_factory.mktemp("tokens")
    first = write_tokens(folder / "a", rows)["digest"]
    assert first == write_tokens(folder / "b", random.sample(rows, len(rows)))["digest"]
    longer = [*rows[:-1], row(rows[-1].sample_id, [*zip(rows[-1].input_ids, rows[-1].loss_mask), (0, False)])]
    flipped = [
        *rows[:-1],
        row(rows[-1].sample_id, [(i, not m) for i, m in zip(rows[-1].input_ids, rows[-1].loss_mask)]),
    ]
    assert first != write_tokens(folder / "c", longer)["digest"]
    assert (first != write_tokens(folder / "d", flipped)["digest"]) == bool(len(rows[-1]))


def test_rows_are_read_only_views_of_one_array(tmp_path):
    write_tokens(tmp_path, (row(str(n), [(n, True)] * 3) for n in range(3000)))
    opened = TokenizedSet.open(tmp_path)
    sample = opened.row(2500)
    assert np.shares_memory(sample.input_ids, opened.flat_ids)
    assert np.shares_memory(sample.loss_mask, opened.flat_mask)
    assert sample.loss_mask.dtype == np.bool_
    with pytest.raises(ValueError, match="read-only"):
        sample.input_ids[0] = 1
    assert len(list(opened)) == 3000


def test_an_unknown_sample_is_an_error(tmp_path):
    write_tokens(tmp_path, ONE)
    opened = TokenizedSet.open(tmp_path)
    with pytest.raises(StoreError, match="sample nobody is not among the 2"):
        opened.by_id("nobody")
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {index} of 2"):
            opened.row(index)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no tokenized sample to write"),
        ([ONE[0], ONE[0]], "two tokenized samples have the id a"),
        ([TokenRow("a", np.array([1, 2]), np.array([True]))], "sample a: 2 ids but 1 mask entries"),
    ],
)
def test_rows_that_make_no_set_are_an_error_and_publish_nothing(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        write_tokens(tmp_path, rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["missing", "truncated", "altered", "no summary", "other columns"])
def test_a_damaged_set_is_a_store_error(tmp_path, harm):
    write_tokens(tmp_path, ONE)
    path = tmp_path / "tokens.parquet"
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif harm == "altered":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif harm == "no summary":
        (tmp_path / "summary.json").unlink()
    else:
        pq.write_table(pq.read_table(path).drop(["columns"]), path)
    with pytest.raises(StoreError, match=str(tmp_path)):
        TokenizedSet.open(tmp_path)


@given(tokens.filter(lambda pairs: any(on for _, on in pairs)), st.integers(1, 10))
def test_a_cut_is_counted_and_never_takes_the_last_supervised_token(pairs, length):
    whole = row("a", pairs)
    if not any(on for _, on in pairs[:length]):
        with pytest.raises(DataError, match=f"no supervised token in the first {length} of {len(pairs)}"):
            cut_to_length(whole, length)
        return
    fitted = cut_to_length(whole, length)
    assert len(fitted.row) == min(length, len(pairs))
    assert fitted.was_cut == (len(pairs) > length)
    assert fitted.row.supervised + fitted.cut_supervised == whole.supervised


@given(st.lists(st.integers(0, 2**31 - 1)), st.sampled_from([np.int32, np.int64]))
def test_digest_is_that_of_the_ids_whatever_their_type(ids: list[int], dtype: type):
    row = TokenRow("a", np.array(ids, dtype=dtype), np.ones(len(ids), np.bool_))
    assert row.token_digest == token_digest(ids)


words = st.text(alphabet="ab \n", max_size=6)


@given(words, words, words)
def test_words_are_found_at_the_end_however_white_space_is_moved(before, said, moved):
    letters = iter("".join(said.split()))
    blanks = [each for each in moved if each.isspace()]
    printed = before + "".join(letter + "".join(blanks) for letter in letters)
    start = find_last_words(printed, said)
    assert start is not None
    assert "".join(printed[start:].split()) == "".join(said.split())
    assert start == len(printed) or not printed[start].isspace()


def test_a_text_that_ends_with_other_words_has_them_nowhere():
    assert find_last_words("a: HI", "hi") is None
    assert find_last_words("hi there", "hi") is None
    assert find_last_words("i", "hi") is None


THOUGHTS = (
    *(
        ("<think>", "</think>"),
        ("<seed:think>", "</seed:think>"),
        ("<think:free>", "</think:free>"),
        ("[THINK]", "[/THINK]"),
    ),
    *(("◁think▷", "◁/think▷"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("<reasoning>", "</reasoning>")),
)


@pytest.mark.parametrize(("begin", "end"), THOUGHTS)
def test_marks_of_thoughts_are_those_of_every_family(begin, end):
    text = f"{begin}a{end}b"
    assert find_leading_thought(f"\n{text}")[0] == begin
    assert find_leading_thought(f"b{text}") is None
    assert make_end_of_thought(find_leading_thought(text)) == end
    assert text[find_end_of_thought(text) :] == "b"
    assert find_open_thought(text) is None
    assert find_open_thought(f"{text}{begin}\n")[0] == begin
    assert fill_empty_thought(f"a{begin}{end}b", "hm") == f"a{begin}hm{end}b"
    assert fill_empty_thought(f"{begin}\n\n{end}\n\n", " hm ") == f"{begin}\nhm\n{end}\n\n"
    assert fill_empty_thought(f"{begin}so{end}", "hm") is None


def test_what_is_no_mark_of_a_thought_is_none():
    assert find_leading_thought("<thinks about>") is None
    assert find_end_of_thought("a < b > c") == 0


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        ("a<think>", "a</think>", "a"),
        ("a<|START_THINKING|>", "a<|START_TEXT|>b", "a"),
        ("a[THINK]", "a[/THINK]", "a"),
        ("ab", "ab<c>", "ab"),
        ("a <b and c", "a <b and d", "a <b and "),
        ("same", "same", "same"),
    ],
)
def test_texts_part_before_the_mark_that_differs(first, second, common):
    assert first[: measure_common_prefix(first, second)] == common == second[: measure_common_prefix(second, first)]


def test_end_of_turn_is_the_special_token_that_follows():
    end = EndOfTurn(["<|end|>", "<|end|>x", ""])
    assert end.after("hi<|end|> more", 2) == 9
    assert end.after("hi <|end|>x more", 2) == 11
    assert end.after("hi more<|end|>", 2) == 2
    assert end.after("hi<|end|>\n<|end|>", 2) == 9
    assert EndOfTurn([]).after("hi<|end|>", 2) == 2
    assert EndOfTurn(["<|end|>"], swallowing=["<|end|>"]).after("hi<|end|>\n a", 2) == 11


def test_a_turn_is_closed_as_far_as_a_server_goes_on_to_generate():
    """Command A and gpt-oss close the answer, then the turn; the header of the next one is no end."""
    end = EndOfTurn(["<|answer|>", "<|turn|>", "<|user|>"], ending=["<|turn|>"])
    assert end.after("hi<|answer|><|turn|><|user|>", 2) == len("hi<|answer|><|turn|>")
    assert end.after("hi<|turn|><|user|>", 2) == len("hi<|turn|>")
    assert end.after("hi<|answer|><|user|>more<|turn|>", 2) == len("hi<|answer|>")
