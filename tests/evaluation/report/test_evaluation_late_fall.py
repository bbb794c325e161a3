"""Acceptance by the place in the text: a draft that fails late is found to, and named in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from report_toys import QUICK, full_report, prompts
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.drafts.target_parts import TargetParts
from draftworks.evaluation.ladder.prompt_acceptance import PromptsByPosition, join_samples, micro_mean
from draftworks.evaluation.ladder.replay import replay_all
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import SLICES, SLICES_PLOT
from draftworks.evaluation.report.writing import find_late_fall, render_report, save_report
from draftworks.storage.identity import EngineIdentity, LayerTap
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy

CONTEXT = 32_768
VOCAB, HIDDEN, LAYERS = 61, 64, 4
TAPS = (LayerTap(2), LayerTap(3))
DRAFT_TOKENS = 4


@dataclass(frozen=True)
class LongText:
    """What the target says after its first token, and the places [begin, end) that are answers."""

    ids: Tensor
    answers: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class LongTarget:
    """A Llama of random small layers whose head looks a token's successor up."""

    model: LlamaForCausalLM = field(repr=False)
    successor: Tensor = field(repr=False)

    @classmethod
    def make(cls) -> LongTarget:
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
        )
        generator = torch.Generator().manual_seed(5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = LlamaForCausalLM(config).eval()
        order = torch.randperm(VOCAB, generator=generator)
        successor = torch.empty_like(order)
        successor[order] = order.roll(-1)  # one cycle of all tokens
        with torch.no_grad():
            embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
            model.get_input_embeddings().weight.copy_(embedding)
            model.get_output_embeddings().weight[successor] = embedding
        return cls(model, successor)

    @property
    def parts(self) -> TargetParts:
        config = self.model.config
        return TargetParts(
            hidden_size=HIDDEN,
            num_heads=2,
            num_kv_heads=1,
            head_dim=config.head_dim,
            intermediate_size=64,
            rms_norm_eps=config.rms_norm_eps,
            vocab_size=VOCAB,
            num_layers=LAYERS,
            max_positions=CONTEXT,
            embedding=self.model.get_input_embeddings().weight.detach(),
            head=self.model.get_output_embeddings().weight.detach(),
        )

    def say(self, first: int, length: int, answers: Sequence[tuple[int, int]]) -> LongText:
        ids = torch.empty(length, dtype=torch.int64)
        ids[0] = first
        for place in range(1, length):
            ids[place] = self.successor[ids[place - 1]]
        return LongText(ids, answers)

    def capture(self, texts: Sequence[LongText]) -> list[dict[str, Tensor]]:
        """Return texts as samples with features. Raises AssertionError where they are not what the target says greedily."""
        engine = HFTargetEngine(self.model, EngineIdentity("hf"), context=CONTEXT)
        samples = []
        for text in texts:
            [features] = engine.capture([text.ids.tolist()], TAPS)
            said = self.parts.head @ features["last"][:-1].T  # (V, S - 1)
            assert torch.equal(said.argmax(0), text.ids[1:]), "the target says something else"
            mask = torch.zeros(len(text.ids), dtype=torch.bool)
            for begin, end in text.answers:
                mask[begin:end] = True
            samples.append({"input_ids": text.ids, "loss_mask": mask, **features})
        return samples

    def capture_long_texts(self, length: int, answer: int) -> list[dict[str, Tensor]]:
        """Return five texts of `length` tokens with an answer near the begin, and one at the end of each doubling of 256."""
        ends = [64 + answer, *(256 * 2**power for power in range(1, (length // 256).bit_length()))]
        return self.capture([self.say(11 * first, length, [(end - answer, end) for end in ends]) for first in range(5)])


def teach_draft(target: LongTarget, length: int, steps: int, sliding_window: int | None) -> DraftStrategy:
    """Train a block draft on texts of `length` tokens."""
    options = DFlashOptions(
        block_size=DRAFT_TOKENS + 1,
        num_layers=1,
        num_anchors=12,
        layer_ids=[tap.hf_index for tap in TAPS],
        sliding_window=sliding_window,
    )
    strategy = DFlashStrategy(options, target.parts, None, seed=3)
    samples = target.capture([target.say(7 * first, length, [(8, length)]) for first in range(8)])
    batch = strategy.collate(samples, [f"s{index}" for index in range(len(samples))])
    optimizer = torch.optim.AdamW(strategy.model.parameters(), lr=4e-3)
    for step in range(steps):
        output = strategy.forward_loss(batch, StepContext(step, steps, training=True))
        (output.loss_sum / output.loss_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return strategy


def walk_by_position(strategy: DraftStrategy, samples: Sequence[dict[str, Tensor]]) -> PromptsByPosition:
    """Return the walk of a draft over these samples, one at a time, in every range of places."""
    batches = (strategy.collate([sample], [f"s{index}"]) for index, sample in enumerate(samples))
    found = replay_all(strategy, batches, DRAFT_TOKENS, torch.device("cpu"))
    return join_samples(one.walk_by_position for one in found)


EARLY, MIDDLE, LATE = prompts(*[[3, 2]] * 6), prompts(*[[2, 2]] * 6), prompts(*[[0, 1]] * 6)
DYING = {0: EARLY, 512: MIDDLE, 2048: LATE}


def report_with(walk: PromptsByPosition) -> Report:
    report = full_report()
    return replace(report, drafts={"trained": replace(report.drafts["trained"], walk_by_position=walk)})


def test_a_clear_fall_is_found_from_the_first_range_to_the_last():
    found = find_late_fall(DYING, QUICK)
    assert (found.first, found.late, found.before, found.after) == (0, 2048, 2.5, 0.5)
    assert found.interval.high < 0
    assert "τ 1.50 at 2048-4095, 3.50 at 0-255" in found.describe()


@pytest.mark.parametrize(
    "walk",
    [
        {},
        {0: EARLY},
        {0: EARLY, 2048: EARLY},
        {0: EARLY, 2048: MIDDLE},
        {0: LATE, 2048: EARLY},
        {0: EARLY, 2048: LATE[:4]},
        {0: EARLY, 2048: prompts(*[[3, 3]] * 3, *[[0, 0]] * 3)},
    ],
    ids=["nothing", "one range", "equal", "a little", "a rise", "few prompts", "by chance"],
)
def test_nothing_is_said_where_nothing_is_clear(walk: PromptsByPosition):
    assert find_late_fall(walk, QUICK) is None


def test_the_report_has_the_ranges_in_table_picture_and_words(tmp_path: Path):
    report = replace(report_with(DYING), columns=None)
    text = render_report(report)
    assert "| position   | 2048-4095" in text
    assert "> **Late in the text the draft accepts less:** τ 1.50" in text
    save_report(report, tmp_path)
    table = pd.read_parquet(tmp_path / SLICES)
    assert table[["column", "value", "prompts", "passes", "accepted"]].values.tolist() == [
        ["position", "0-255", 6, 12, 30],
        ["position", "512-1023", 6, 12, 24],
        ["position", "2048-4095", 6, 12, 6],
    ]
    assert (tmp_path / SLICES_PLOT).exists()
    assert Report.load(tmp_path).drafts == report.drafts
    assert "Late in the text" not in render_report(report_with({0: EARLY, 256: EARLY}))
    assert "| position" not in render_report(report_with({0: EARLY}))


TRAINED_ON, ANSWER, WINDOW = 96, 40, 24


@pytest.mark.parametrize(
    ("length", "ranges"),
    [(2048, 4), pytest.param(32_768, 8, marks=pytest.mark.long)],
    ids=["2k", "32k"],
)
def test_a_draft_that_knows_short_texts_dies_late_and_one_with_a_window_lives(length: int, ranges: int):
    torch.set_num_threads(1)
    target = LongTarget.make()
    samples = target.capture_long_texts(length, ANSWER)
    dying, living = (
        walk_by_position(teach_draft(target, TRAINED_ON, 110, window), samples) for window in (None, WINDOW)
    )
    assert list(dying) == list(living) == [0, *(256 * 2**power for power in range(ranges - 1))]
    early, *late = [micro_mean(prompts) for prompts in dying.values()]
    assert early > 2
    assert max(late) < 0.5 * early
    assert min(micro_mean(prompts) for prompts in living.values()) > 2
    assert find_late_fall(living, QUICK) is None
    report = full_report()
    measured = replace(report.drafts["trained"], walk_by_position=dying)
    text = render_report(replace(report, drafts={"trained": measured}))
    assert (
        f"**Late in the text the draft accepts less:** τ {1 + late[-1]:.2f} at {length // 2}-{length - 1}, {1 + early:.2f}"
        in text
    )
