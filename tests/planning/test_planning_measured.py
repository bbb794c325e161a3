"""What a measured sample says where time ended before all of its prompts were answered, and what of it is read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.planning.estimates import Estimate
from draftworks.planning.lengths import ConversationSize
from draftworks.planning.measured import MeasuredSample, Speed, add_unfinished, list_samples, locate_sample, save_sample

IDENTITY = {"target": "0123456789abcdef", "data": "one"}


def mean(samples: float, tokens: float, generated: float) -> ConversationSize:
    return ConversationSize(*map(Estimate.exactly, (samples, tokens, generated)))


def test_unfinished_answers_have_what_was_made_to_what_their_limit_allows():
    """Half of the conversations ended with 10 tokens of answer; of all 9 tokens were made on average, 100 are allowed."""
    found = add_unfinished(mean(1, 30, 10), share=0.5, made=9, prompt=20, most=100)
    assert (found.generated.low, found.generated.value, found.generated.high) == (9.5, 32.5, 55)
    assert (found.tokens.value, found.tokens.high) == (0.5 * 30 + 0.5 * (30 + 120) / 2, 0.5 * 30 + 0.5 * 120)
    none = add_unfinished(None, share=0, made=9, prompt=20, most=100)
    assert (none.generated.low, none.generated.value, none.generated.high) == (9, 54.5, 100)
    assert none.tokens.high == 120
    assert add_unfinished(mean(1, 30, 10), share=1, made=10, prompt=20, most=100) == mean(1, 30, 10)


@pytest.mark.parametrize("damage", ["", "{}", '{"schema": 1, "identity": {}}'])
def test_samples_are_read_as_they_were_saved_and_damaged_ones_are_left_out(tmp_path: Path, damage: str):
    saved = MeasuredSample(IDENTITY, 5.0, 20, 19, mean(1, 30, 10), 2.0, Speed(100, 2.0), None)
    newer = MeasuredSample({**IDENTITY, "data": "two"}, 6.0, 20, 20, mean(1, 30, 10), 2.0, None, Speed(100, 2.0))
    for each in (saved, newer):
        save_sample(locate_sample(tmp_path, each.identity), each)
    locate_sample(tmp_path, IDENTITY).with_name("damaged.json").write_text(damage)
    assert list_samples(tmp_path, IDENTITY["target"]) == [newer, saved]
    assert list_samples(tmp_path, "f" * 16) == []
