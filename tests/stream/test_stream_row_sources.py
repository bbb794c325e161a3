"""Every sample of a source is in one task, and of answers only those are lost that the target refuses."""

from __future__ import annotations

import numpy as np
from answer_toys import conversation
from hypothesis import given
from hypothesis import strategies as st

from draftworks.capture.engine import Generated
from draftworks.config.registry_files import ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.tokenized import TokenRow
from draftworks.errors import CaptureError
from draftworks.stream.row_sources import ConversationSource, TaskLimits, TokenSource


@given(st.lists(st.integers(1, 12), max_size=12), st.integers(1, 40), st.integers(1, 5), st.integers(1, 99))
def test_tasks_are_consecutive_samples_within_the_tokens_of_a_batch_and_the_limits(
    lengths: list[int], batch_tokens: int, samples: int, nbytes: int
):
    rows = [TokenRow(f"s{n}", np.ones(size, np.int32), np.ones(size, np.bool_)) for n, size in enumerate(lengths)]
    source = TokenSource(rows, batch_tokens)
    tasks = list(source.list_tasks("run", TaskLimits(3, samples, nbytes)))
    made = [source.make_rows(task, None) for task in tasks]
    assert [row for batch in made for row in batch] == rows
    assert [task.sample_ids for task in tasks] == [tuple(row.sample_id for row in batch) for batch in made]
    assert [task.num_tokens for task in tasks] == [sum(len(row.input_ids) for row in batch) for batch in made]
    assert [task.step for task in tasks] == sorted({task.step for task in tasks})
    assert [task.size for task in tasks] == [(len(task.sample_ids), 3 * task.num_tokens) for task in tasks]
    assert source.measure(2) == sum(sorted(lengths)[-2:])
    for batch, task in zip(made, tasks, strict=True):
        assert len(batch) == 1 or (len(batch) <= samples and task.size <= (samples, nbytes))
        assert len(batch) == 1 or task.size[1] <= nbytes
        assert len(batch) == 1 or len(batch) * max(len(row.input_ids) for row in batch) <= batch_tokens


class ChoosyEngine:
    """Answers with a fixed text, unless a prompt among those it gets is one that it refuses."""

    concurrent = False
    replicas = 1

    def __init__(self, answer: tuple[int, ...], refused: str) -> None:
        self._answer = answer
        self._refused = refused

    def generate(self, prompts, sampling, sample_ids, max_total, turn=0, end_ids=()) -> list[Generated]:
        if self._refused in sample_ids:
            raise CaptureError("a prompt is refused")
        return [Generated(self._answer, finished=True) for _ in prompts]


def test_of_a_batch_of_conversations_only_the_refused_one_is_lost(tiny_target: TargetFiles):
    chat = ChatTokenizer.load(tiny_target)
    said = tuple(chat._tokenizer("It returns.<|im_end|>", add_special_tokens=False)["input_ids"])
    asked = [conversation(number) for number in range(5)]
    source = ConversationSource(asked, chat, ResponseSpec(batch_size=3), max_length=200)
    engine = ChoosyEngine(said, refused=asked[1].id)
    tasks = list(source.list_tasks("run"))
    rows = [row for task in tasks for row in source.make_rows(task, engine)]
    assert [row.sample_id for row in rows] == [asked[number].id for number in (0, 2, 3, 4)]
    for row in rows:
        assert tuple(row.input_ids[row.loss_mask].tolist()) == said
    short = ConversationSource(asked, chat, ResponseSpec(batch_size=3), max_length=4)
    assert [short.make_rows(task, engine) for task in tasks] == [[], []]
