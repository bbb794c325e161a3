"""Regenerated conversations: token-exact, with label masks on generated tokens only, and resumable."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from answer_toys import answering_run, conversation
from capture_toys import WatchedEngine
from waiting import HANG_S

from draftworks.capture.answers.answer_sets import CONVERSATIONS, find_answers_file
from draftworks.capture.answers.regenerate import regenerate
from draftworks.capture.batch_notes import Progress
from draftworks.capture.engine import KNOWN_BACKENDS
from draftworks.config.run_files import TOKENS_FOLDER, RegenerateRun, TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import (
    QUARANTINE_FILE,
    Conversation,
    Turn,
    read_conversations,
)
from draftworks.data.tokenized import TokenizedSet
from draftworks.errors import ConfigError, DataError, EngineError


@pytest.fixture(scope="module")
def chat(tiny_target: TargetFiles) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_target)


def make_run(target: TargetFiles, folder: Path, conversations: list[Conversation], **options) -> RegenerateRun:
    responses = {"max_new_tokens": 12, **options.pop("responses", {})}
    return answering_run(target, folder, conversations, responses=responses, **{"max_length": 200, **options})


class Ending(WatchedEngine):
    """Engine that ends every response after three tokens, so that conversations continue whatever the weights are."""

    def generate(self, prompts, sampling, sample_ids, max_total, turn=0, end_ids=()):
        from draftworks.capture.engine import Generated

        (end,) = end_ids
        short = sampling.model_copy(update={"max_new_tokens": 3})
        responses = super().generate(prompts, short, sample_ids, max_total, turn, ())
        return [Generated((*(token for token in each.ids if token != end), end), True) for each in responses]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_prompt_that_is_answered_greedily_is_asked_once(temperature, tiny_target, tmp_path: Path, watched, chat):
    """Each further answer would be the same sample, and count as a prompt of its own in every interval."""
    turns = [[Turn("user", f"What is {n}?"), Turn("assistant", f"{k}")] for n in range(3) for k in range(4)]
    run = make_run(tiny_target, tmp_path, list(map(Conversation.of, turns)), responses={"temperature": temperature})
    summary = regenerate(run, watched, chat)
    once = temperature == 0
    assert (summary.conversations, summary.tokens["repeated"]) == ((3, 9) if once else (12, 0))
    assert len(TokenizedSet.open(run.out / TOKENS_FOLDER)) == (3 if once else 12)
    again = regenerate(run, watched, chat)
    assert (again.resumed, again.tokens["repeated"]) == (summary.conversations, summary.tokens["repeated"])


def test_samples_are_prompt_then_generated_ids(tiny_target, tmp_path: Path, watched, chat):
    sources = [conversation(i) for i in range(7)]
    run = make_run(tiny_target, tmp_path, sources)
    summary = regenerate(run, watched, chat)
    tokens = TokenizedSet.open(run.out / TOKENS_FOLDER)
    answered = list(read_conversations(run.out / CONVERSATIONS))
    assert list(tokens.sample_ids) == [each.id for each in answered] == [each.id for each in sources]
    for index, source in enumerate(sources):
        prompt = chat.encode_prompt(source.turns[:1])
        response = watched.generate([prompt], run.responses, [source.id], 200)[0]
        row = tokens.row(index)
        assert row.input_ids.tolist() == [*prompt, *response.ids]
        assert row.loss_mask.tolist() == [False] * len(prompt) + [True] * len(response.ids)
        assert answered[index].turns == (source.turns[0], Turn("assistant", chat.decode(response.ids)))
        assert answered[index].columns == row.columns == {"number": index}
    assert summary.generated_tokens == tokens.summary["supervised_tokens"]
    assert summary.conversations == 7


def test_later_turns_follow_the_generated_ones_token_for_token(tiny_target, tmp_path: Path, tiny_engine, chat):
    engine = Ending(tiny_engine)
    source = conversation(1, exchanges=3)
    regenerate(make_run(tiny_target, tmp_path, [source, conversation(2)]), engine, chat)
    row = TokenizedSet.open(tmp_path / "out" / TOKENS_FOLDER).by_id(source.id)
    runs = np.flatnonzero(np.diff(np.r_[0, row.loss_mask.astype(int), 0])).reshape(-1, 2)
    assert len(runs) == 3
    turns = list(source.turns[:1])
    ids = chat.encode_prompt(turns)
    for number, (start, end) in enumerate(runs):
        assert row.input_ids[:start].tolist() == ids
        ids = row.input_ids[:end].tolist()
        turns += [Turn("assistant", chat.decode(ids[start:])), *source.turns[2 * number + 2 : 2 * number + 3]]
        if number < 2:
            ids = chat.encode_prompt(turns)
    answered = next(iter(read_conversations(tmp_path / "out" / CONVERSATIONS)))
    assert answered.turns == tuple(turns)


def test_only_last_turn_masks_only_the_last(tiny_target, tmp_path: Path, tiny_engine, chat):
    run = make_run(tiny_target, tmp_path, [conversation(1, exchanges=2)], only_last_turn=True)
    regenerate(run, Ending(tiny_engine), chat)
    mask = TokenizedSet.open(run.out / TOKENS_FOLDER).row(0).loss_mask
    assert np.count_nonzero(np.diff(mask.astype(int)) == 1) == 1
    assert mask[-1]


@pytest.mark.parametrize(("goes_on", "turns"), [(True, 6), (False, 2)])
def test_a_conversation_goes_on_after_a_turn_that_was_cut_unless_told_otherwise(
    goes_on, turns, tiny_target, tmp_path: Path, watched, chat
):
    responses = {"max_new_tokens": 1, "continue_after_cut": goes_on}
    run = make_run(tiny_target, tmp_path, [conversation(1, exchanges=3)], responses=responses)
    regenerate(run, watched, chat)
    assert len(next(iter(read_conversations(run.out / CONVERSATIONS))).turns) == turns


def test_max_length_is_never_passed(tiny_target, tmp_path: Path, tiny_engine, chat):
    prompt = len(chat.encode_prompt(conversation(1).turns[:1]))
    run = make_run(tiny_target, tmp_path, [conversation(1, exchanges=9)], max_length=prompt + 40)
    regenerate(run, Ending(tiny_engine), chat)
    row = TokenizedSet.open(run.out / TOKENS_FOLDER).row(0)
    assert len(row) <= prompt + 40
    assert row.loss_mask[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_resumed_equals_straight(tiny_target, tmp_path: Path, watched, chat, temperature):
    sources = [conversation(i, 1 + i % 2) for i in range(10)]
    options = {"responses": {"temperature": temperature, "batch_size": 2}}
    straight = make_run(tiny_target, tmp_path / "a", sources, **options)
    regenerate(straight, watched, chat)
    broken = make_run(tiny_target, tmp_path / "b", sources, **options)

    def stop(at: Progress) -> None:
        if at.done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(broken, watched, chat, stop)
    with find_answers_file(broken).open("ab") as stream:
        stream.write(b'{"id": "torn')
    summary = regenerate(broken, watched, chat)
    assert summary.resumed == 4
    sets = [TokenizedSet.open(run.out / TOKENS_FOLDER).digest for run in (straight, broken)]
    assert sets[0] == sets[1]


def test_finished_run_loads_no_engine_again(tiny_target, tmp_path: Path, watched, chat):
    run = make_run(tiny_target, tmp_path, [conversation(1)])
    regenerate(run, watched, chat)
    assert regenerate(run, watched, chat).generated_tokens == 0
    assert watched.loads == 1


def test_new_conversations_alone_are_answered(tiny_target, tmp_path: Path, watched, chat):
    regenerate(make_run(tiny_target, tmp_path, [conversation(i) for i in range(6)]), watched, chat)
    summary = regenerate(make_run(tiny_target, tmp_path, [conversation(i) for i in range(2, 8)]), watched, chat)
    assert (summary.conversations, summary.resumed) == (6, 4)


def test_answers_of_other_settings_are_not_used(tiny_target, tmp_path: Path, watched, chat):
    run = make_run(tiny_target, tmp_path, [conversation(1)])
    regenerate(run, watched, chat)
    assert regenerate(run.model_copy(update={"max_length": 99}), watched, chat).resumed == 0


SILENT = Conversation.of([Turn("user", "Is anybody there?")])
LONG = Conversation.of([Turn("user", "words and " * 300), Turn("assistant", "Yes.")])


def test_conversations_without_a_response_are_dropped_with_their_reason(tiny_target, tmp_path: Path, watched, chat):
    run = make_run(tiny_target, tmp_path, [SILENT, conversation(1), LONG], max_rejected_share=0.7)
    summary = regenerate(run, watched, chat)
    assert summary.tokens["samples"] == 1
    assert summary.tokens["rejected"] == 2
    assert sum(summary.tokens["rejected_reasons"].values()) == 2
    lines = [json.loads(line) for line in (run.out / QUARANTINE_FILE).read_text().splitlines()]
    assert [line["sample_id"] for line in lines] == [SILENT.id, LONG.id]
    assert "no assistant turn after a user turn" in lines[0]["reason"]
    assert "leaves no room for a response within max_length 200" in lines[1]["reason"]
    assert lines[1]["excerpt"].startswith(LONG.turns[0].content[:20])


def test_too_many_prompts_without_room_are_an_error_before_the_target_is_loaded(tiny_target, tmp_path: Path, chat):
    def load():
        raise AssertionError("the target was loaded")

    sources = [*map(conversation, range(3)), LONG, SILENT]
    run = make_run(tiny_target, tmp_path, sources, max_rejected_share=0.2)
    with pytest.raises(DataError, match=r"2 of 5 conversations give no sample \(40.0%\), max_rejected_share allows 20"):
        regenerate(run, load, chat)
    assert len((run.out / QUARANTINE_FILE).read_text().splitlines()) == 2


def test_more_dropped_conversations_than_allowed_are_an_error(tiny_target, tmp_path: Path, watched, chat):
    run = make_run(tiny_target, tmp_path, [SILENT, *map(conversation, range(3)), LONG], max_rejected_share=0.2)
    with pytest.raises(DataError, match=r"2 of 5 conversations give no sample \(40.0%\).* allows 20.0%") as raised:
        regenerate(run, watched, chat)
    file = run.out / QUARANTINE_FILE
    assert SILENT.id in str(raised.value)
    assert f"All of them are in {file}" in str(raised.value)
    assert len(file.read_text().splitlines()) == 2
    assert not (run.out / TOKENS_FOLDER).exists()
    assert watched.loads == 0  # no answer was paid for
    allowed = regenerate(run.model_copy(update={"max_rejected_share": 0.4}), watched, chat)
    assert (allowed.tokens["samples"], allowed.generated_tokens) == (3, 3 * 12)


def test_what_was_not_said_is_counted_also_after_a_resume(tiny_target, tmp_path: Path, watched, chat):
    sources = [conversation(1, exchanges=3), conversation(2), conversation(3, exchanges=2)]
    run = make_run(tiny_target, tmp_path, sources, responses={"max_new_tokens": 1, "continue_after_cut": False})
    for resumed in (0, 3):
        summary = regenerate(run, watched, chat)
        assert summary.resumed == resumed
        counts = TokenizedSet.open(run.out / TOKENS_FOLDER).summary
        assert (counts["unfinished_answers"], counts["dropped_turns"], counts["rejected"]) == (3, 2 + 0 + 1, 0)


def test_turns_for_which_there_is_no_room_are_counted(tiny_target, tmp_path: Path, tiny_engine, chat):
    source = conversation(1, exchanges=9)
    prompt = len(chat.encode_prompt(source.turns[:1]))
    regenerate(make_run(tiny_target, tmp_path, [source], max_length=prompt + 40), Ending(tiny_engine), chat)
    counts = TokenizedSet.open(tmp_path / "out" / TOKENS_FOLDER).summary
    written = next(iter(read_conversations(tmp_path / "out" / CONVERSATIONS))).turns
    answered = sum(turn.role == "assistant" for turn in written)
    assert 0 < answered < 9
    assert (counts["unfinished_answers"], counts["dropped_turns"]) == (0, 9 - answered)


def test_answers_of_other_numerics_are_not_used(tiny_target, tmp_path: Path, watched, chat, monkeypatch):
    run = make_run(tiny_target, tmp_path, [conversation(1)])
    regenerate(run, watched, chat)
    raised = replace(KNOWN_BACKENDS["hf"], numerics=KNOWN_BACKENDS["hf"].numerics + 1)
    monkeypatch.setitem(KNOWN_BACKENDS, "hf", raised)
    assert regenerate(run, watched, chat).resumed == 0


def test_nothing_but_dropped_conversations_is_an_error(tiny_target, tmp_path: Path, watched, chat):
    run = make_run(tiny_target, tmp_path, [SILENT], max_rejected_share=1.0)
    with pytest.raises(DataError, match="1 of 1 conversations give no sample.*(?s:.)*no assistant turn"):
        regenerate(run, watched, chat)
    assert watched.loads == 0


def test_progress_ends_complete(tiny_target, tmp_path: Path, watched, chat):
    seen: list[Progress] = []
    regenerate(make_run(tiny_target, tmp_path, [conversation(i) for i in range(5)]), watched, chat, seen.append)
    assert seen[-1].done == seen[-1].total == 5
    assert seen[-1].eta_s == 0
    assert seen[-1].tokens_per_s > 0


def test_progress_tells_conversations_throughput_and_the_time_left_of_this_run_alone(
    tiny_target, tmp_path: Path, tiny_engine, chat
):
    """A conversation takes 10 s and three tokens; loading the target takes an hour, which must not be counted."""
    now = [0.0]

    class Slow(Ending):
        def __call__(self):
            now[0] += 3600
            return super().__call__()

        def generate(self, prompts, *arguments, **options):
            now[0] += 10
            return super().generate(prompts, *arguments, **options)

    regenerate(make_run(tiny_target, tmp_path, [conversation(0)], responses={"batch_size": 1}), Slow(tiny_engine), chat)
    run = make_run(tiny_target, tmp_path, [conversation(number) for number in range(5)], responses={"batch_size": 1})
    seen: list[Progress] = []
    summary = regenerate(run, Slow(tiny_engine), chat, seen.append, clock=lambda: now[0])
    each = summary.generated_tokens // 4
    assert [now.summarize() for now in seen[1:4]] == [
        {"conversations": "1/5", "tokens": 0, "tokens/s": 0, "eta": "?"},
        {"conversations": "2/5", "tokens": each, "tokens/s": round(each / 10), "eta": "29s"},
        {"conversations": "3/5", "tokens": 2 * each, "tokens/s": round(each / 10), "eta": "19s"},
    ]
    assert (seen[-1].eta_s, summary.seconds) == (0, 40)


class Concurrent(Ending):
    """Engine that answers each conversation separately, as a server does; counts how many run at a time."""

    concurrent = True

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self._lock = threading.Lock()
        self.inside = self.most = 0
        self.fails_on = ""

    def generate(self, prompts, sampling, sample_ids, max_total, turn=0, end_ids=()):
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            if self.fails_on in sample_ids:
                raise EngineError("the server is gone")
            time.sleep(0.02)
            return super().generate(prompts, sampling, sample_ids, max_total, turn, end_ids)
        finally:
            with self._lock:
                self.inside -= 1


def test_conversations_answered_each_for_itself_are_those_of_a_batch(tiny_target, tmp_path: Path, tiny_engine, chat):
    sources = [conversation(i, 1 + i % 3) for i in range(9)]
    together = make_run(tiny_target, tmp_path / "a", sources)
    alone = make_run(tiny_target, tmp_path / "b", sources)
    regenerate(together, Ending(tiny_engine), chat)
    engine = Concurrent(tiny_engine)
    summary = regenerate(alone, engine, chat)
    digests = {TokenizedSet.open(run.out / TOKENS_FOLDER).digest for run in (together, alone)}
    assert len(digests) == 1
    assert 1 < engine.most <= alone.responses.batch_size
    assert (engine.loads, summary.conversations) == (1, 9)


def test_what_was_finished_before_the_engine_failed_is_kept(tiny_target, tmp_path: Path, tiny_engine, chat):
    sources = [conversation(i) for i in range(9)]
    run = make_run(tiny_target, tmp_path, sources, responses={"batch_size": 2})
    engine = Concurrent(tiny_engine)
    engine.fails_on = sources[8].id
    with pytest.raises(EngineError, match="the server is gone"):
        regenerate(run, engine, chat)
    engine.fails_on = ""
    assert 0 < regenerate(run, engine, chat).resumed < 9


class Stuck(Concurrent):
    """Answers no request before `go`, but refuses one as soon as three wait, in `threads`."""

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.go, self.stuck = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []

    def generate(self, prompts, sampling, sample_ids, *arguments, **options):
        if self.fails_on in sample_ids:
            assert self.stuck.wait(HANG_S)
            raise ConfigError("the key is refused")
        self.threads.append(threading.current_thread())
        if len(self.threads) == 3:
            self.stuck.set()
        self.go.wait(HANG_S)
        raise EngineError("nobody waits for this")


def test_an_error_waits_for_no_answer_and_neither_does_the_end_of_the_program(
    tiny_target, tmp_path: Path, tiny_engine, chat
):
    run = make_run(tiny_target, tmp_path, [conversation(i) for i in range(4)], responses={"batch_size": 4})
    engine = Stuck(tiny_engine)
    engine.fails_on = conversation(2).id
    with pytest.raises(ConfigError, match="the key is refused"):
        regenerate(run, engine, chat)
    assert [thread.daemon for thread in engine.threads if thread.is_alive()] == [True] * 3
    engine.go.set()
