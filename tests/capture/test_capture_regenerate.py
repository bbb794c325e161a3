"""Regenerated conversations: token-exact, masked where the target spoke, resumable."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from capture_toys import WatchedEngine

from draftworks.capture.partial import PartialFile
from draftworks.capture.regenerate import CONVERSATIONS, TOKENS, RegenerateProgress, answers_file, regenerate
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation, Turn, read_conversations, write_conversations
from draftworks.data.tokenized import TokenizedSet
from draftworks.errors import DataError, StoreError
from draftworks.runs import RegenerateRun, TargetFiles
from draftworks.specs import ResponseSpec


def conversation(number: int, exchanges: int = 1) -> Conversation:
    turns = []
    for exchange in range(exchanges):
        turns += [Turn("user", f"What does function {number} do, part {exchange}?"), Turn("assistant", "It returns.")]
    return Conversation.of(turns, {"number": number})


@pytest.fixture(scope="module")
def chat(tiny_target: TargetFiles) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_target)


def make_run(target: TargetFiles, folder: Path, conversations: list[Conversation], **options) -> RegenerateRun:
    write_conversations(folder / "source", conversations)
    responses = {"max_new_tokens": 12, "batch_size": 3, **options.pop("responses", {})}
    return RegenerateRun(
        out=folder / "out",
        target=target,
        conversations=folder / "source",
        answers=folder / "answers",
        responses=ResponseSpec(**responses),
        **{"max_length": 200, "device": "cpu", **options},
    )


class Ending(WatchedEngine):
    """Ends every response after three tokens, so that conversations go on whatever the weights are."""

    def generate(self, prompts, sampling, sample_ids, max_total, turn=0, end_ids=()):
        from draftworks.capture.engine import Generated

        (end,) = end_ids
        short = sampling.model_copy(update={"max_new_tokens": 3})
        responses = super().generate(prompts, short, sample_ids, max_total, turn, ())
        return [Generated((*(token for token in each.ids if token != end), end), True) for each in responses]


def test_samples_are_prompt_then_generated_ids(tiny_target, tmp_path: Path, watched, chat):
    sources = [conversation(i) for i in range(7)]
    run = make_run(tiny_target, tmp_path, sources)
    summary = regenerate(run, watched, chat)
    tokens = TokenizedSet.open(run.out / TOKENS)
    answered = list(read_conversations(run.out / CONVERSATIONS))
    assert list(tokens.sample_ids) == [each.id for each in answered] == [each.id for each in sources]
    for index, source in enumerate(sources):
        prompt = chat.prompt_ids(source.turns[:1])
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
    row = TokenizedSet.open(tmp_path / "out" / TOKENS).by_id(source.id)
    runs = np.flatnonzero(np.diff(np.r_[0, row.loss_mask.astype(int), 0])).reshape(-1, 2)
    assert len(runs) == 3
    turns = list(source.turns[:1])
    ids = chat.prompt_ids(turns)
    for number, (start, end) in enumerate(runs):
        assert row.input_ids[:start].tolist() == ids
        ids = row.input_ids[:end].tolist()
        turns += [Turn("assistant", chat.decode(ids[start:])), *source.turns[2 * number + 2 : 2 * number + 3]]
        if number < 2:
            ids += chat.continuation_ids(turns[:-1], turns[-1:])
    answered = next(iter(read_conversations(tmp_path / "out" / CONVERSATIONS)))
    assert answered.turns == tuple(turns)


def test_only_last_turn_masks_only_the_last(tiny_target, tmp_path: Path, tiny_engine, chat):
    run = make_run(tiny_target, tmp_path, [conversation(1, exchanges=2)], only_last_turn=True)
    regenerate(run, Ending(tiny_engine), chat)
    mask = TokenizedSet.open(run.out / TOKENS).row(0).loss_mask
    assert np.count_nonzero(np.diff(mask.astype(int)) == 1) == 1
    assert mask[-1]


def test_conversation_stops_at_a_turn_that_was_cut(tiny_target, tmp_path: Path, watched, chat):
    run = make_run(tiny_target, tmp_path, [conversation(1, exchanges=3)], responses={"max_new_tokens": 1})
    regenerate(run, watched, chat)
    assert len(next(iter(read_conversations(run.out / CONVERSATIONS))).turns) == 2


def test_max_length_is_never_passed(tiny_target, tmp_path: Path, tiny_engine, chat):
    prompt = len(chat.prompt_ids(conversation(1).turns[:1]))
    run = make_run(tiny_target, tmp_path, [conversation(1, exchanges=9)], max_length=prompt + 40)
    regenerate(run, Ending(tiny_engine), chat)
    row = TokenizedSet.open(run.out / TOKENS).row(0)
    assert len(row) <= prompt + 40
    assert row.loss_mask[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_resumed_equals_straight(tiny_target, tmp_path: Path, watched, chat, temperature):
    sources = [conversation(i, 1 + i % 2) for i in range(10)]
    options = {"responses": {"temperature": temperature, "batch_size": 2}}
    straight = make_run(tiny_target, tmp_path / "a", sources, **options)
    regenerate(straight, watched, chat)
    broken = make_run(tiny_target, tmp_path / "b", sources, **options)

    def stop(at: RegenerateProgress) -> None:
        if at.done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(broken, watched, chat, stop)
    with answers_file(broken).open("ab") as stream:
        stream.write(b'{"id": "torn')
    summary = regenerate(broken, watched, chat)
    assert summary.resumed == 4
    sets = [TokenizedSet.open(run.out / TOKENS).digest for run in (straight, broken)]
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


def test_a_file_begun_with_other_settings_is_refused(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    PartialFile(path, {"target": "a"}).__exit__(None, None, None)
    with pytest.raises(StoreError, match=r"answers.jsonl was begun with other settings"):
        PartialFile(path, {"target": "b"})


def test_conversations_without_a_response_are_dropped_with_their_reason(tiny_target, tmp_path: Path, watched, chat):
    silent = Conversation.of([Turn("user", "Is anybody there?")])
    long = Conversation.of([Turn("user", "words and " * 300), Turn("assistant", "Yes.")])
    run = make_run(tiny_target, tmp_path, [silent, conversation(1), long])
    summary = regenerate(run, watched, chat)
    assert "has no assistant turn" in summary.dropped[silent.id]
    assert "leaves no room for a response within max_length 200" in summary.dropped[long.id]
    assert summary.tokens["samples"] == 1


def test_nothing_but_dropped_conversations_is_an_error(tiny_target, tmp_path: Path, watched, chat):
    run = make_run(tiny_target, tmp_path, [Conversation.of([Turn("user", "Is anybody there?")])])
    with pytest.raises(DataError, match="no conversation got a response; the first: .* has no assistant turn"):
        regenerate(run, watched, chat)
    assert watched.loads == 0


def test_progress_ends_complete(tiny_target, tmp_path: Path, watched, chat):
    seen: list[RegenerateProgress] = []
    regenerate(make_run(tiny_target, tmp_path, [conversation(i) for i in range(5)]), watched, chat, seen.append)
    assert seen[-1].done == seen[-1].conversations == 5
    assert seen[-1].eta_s == 0
    assert seen[-1].tokens_per_s > 0


def test_partial_file_torn_anywhere_keeps_its_whole_records(tmp_path: Path):
    path = tmp_path / "partial.jsonl"
    with PartialFile(path, {"a": 1}) as partial:
        partial.extend([{"id": "x", "n": 1}, {"id": "y", "n": 2}])
    whole = path.read_bytes()
    starts = [whole.index(b'{"id": "x"'), whole.index(b'{"id": "y"'), len(whole)]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with PartialFile(path, {"a": 1}) as partial:
            assert [name in partial for name in "xy"] == [length >= starts[1], length >= starts[2]]
            partial.extend([{"id": "z", "n": 3}])
            assert partial["z"]["n"] == 3
        assert all(json.loads(line) for line in path.read_text().splitlines())
