"""Tokenizing conversations: nothing depends on the number of processes, nothing is lost silently."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
from processes import wait_until_ended

from draftworks.config.registry_files import DataSpec
from draftworks.data.conversations import ANSWER, Conversation, Turn
from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.data.tokenizing import cut_rows, tokenize
from draftworks.errors import ConfigError, DataError


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
