"""A batch of answers that prompts join and leave while it is decoded.

Prompts are read in groups of about the same length, and join the batch as others have ended: no step waits for the longest
answer, and no prompt is padded to the longest. How many answers run at a time is bounded by `batch_size` and by the bytes
of their keys and values.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from draftworks.capture.engine import Advance, AnsweredPrompt, AskedPrompt, Generated
from draftworks.capture.engines.caches import GROWTH, Frame, RowSize, is_joinable, join_caches, make_growing_cache
from draftworks.capture.engines.llama_steps import LlamaAnswers, LlamaSteps
from draftworks.capture.engines.sampling import choose_next_tokens, draw_uniforms
from draftworks.config.registry_files import ResponseSpec
from draftworks.errors import CaptureError

READ_TOKENS = 1024
"""Tokens of prompts that are read together: enough for products of full speed, and little memory."""
READ_WASTE = 1 / 8
"""Largest share of padding in prompts that are read together."""
COMPACT_BELOW = 0.85
"""Ended batch rows are removed once fewer than this share is still decoding: copying the cache costs time too."""
COMPACT_STEPS_BELOW = 0.97
"""The same for `llama_steps`, which copies only the rows that take the place of ended ones."""
JOIN_SHARE = 0.1
"""Prompts join once they are this share of the answers that are decoded, as each time the cache is copied."""
WEIGHTS_SHARE = 0.3
"""Bytes of keys and values on a CPU by those of the weights: the process then stays below 2.5 times the weights of a model of
135 M parameters, 0.7 of which are libraries."""
LEAST_BUDGET = 64 << 20

log = logging.getLogger(__name__)


@dataclass
class Row:
    """One prompt and its answer so far. The cache holds all of its tokens but the last one.

    Attributes:
        limit: largest number of new tokens.
        uniforms: random numbers, one per new token; None before the prompt is read, empty for greedy decoding.
    """

    asked: AskedPrompt
    limit: int
    uniforms: np.ndarray | None = None
    ids: list[int] = field(default_factory=list)
    ended: bool = False
    finished: bool = False

    @property
    def held(self) -> int:
        """Number of tokens in the cache, once the prompt is read."""
        return len(self.asked.prompt) + len(self.ids) - 1

    @property
    def left(self) -> int:
        return self.limit - len(self.ids)

    def take(self, token: int, end_tokens: frozenset[int]) -> None:
        """Append a token."""
        self.ids.append(token)
        self.finished = token in end_tokens
        self.ended = self.finished or not self.left

    def make_answer(self) -> AnsweredPrompt:
        return AnsweredPrompt(self.asked, Generated(tuple(self.ids), self.finished))


@dataclass(frozen=True)
class _Group:
    """Prompts that were read together: the cache's rows `chosen` go on as `rows`."""

    cache: DynamicCache
    rows: Sequence[Row]
    chosen: Tensor
    seen: Tensor | None


class Kept(Protocol):
    """What a model keeps of the rows of a batch between two steps."""

    def join(self, keep: Tensor, read: Sequence[DynamicCache], rows: Sequence[Tensor], frame: Frame) -> None:
        """Keep these rows, then add those rows of what the model itself made of prompts."""

    def keep(self, rows: Tensor) -> None:
        """Keep these rows (their indices) only, in this order."""

    def step(self, tokens: Tensor, positions: Tensor, frame: Frame) -> Tensor:
        """Return the logits (B, V) after one more token for each row; tokens and positions are (B,)."""
        ...


class ModelCache:
    """The cache of a model of any kind, whose own forward makes the steps."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache: DynamicCache | None = None

    def join(self, keep: Tensor, read: Sequence[DynamicCache], rows: Sequence[Tensor], frame: Frame) -> None:
        if self._cache is not None and len(keep):
            read, rows = [self._cache, *read], [keep, *rows]
        if is_joinable(read[0]):
            self._cache = join_caches(read, rows, frame)
        else:
            (self._cache,) = read
            self.keep(*rows)

    def keep(self, rows: Tensor) -> None:
        assert self._cache is not None
        self._cache.reorder_cache(cast(torch.LongTensor, rows.to(self._model.device)))

    def step(self, tokens: Tensor, positions: Tensor, frame: Frame) -> Tensor:
        mask = None if frame.is_full else (torch.arange(frame.width + 1) >= frame.starts[:, None]).long()  # (B, W + 1)
        assert self._cache is not None
        return run_model(self._model, tokens[:, None], mask, positions[:, None], self._cache)


def run_model(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache
) -> Tensor:
    """Return the logits (B, V) of the last of these tokens (B, S), which are added to the cache."""
    output = model(
        input_ids=ids.to(model.device),
        attention_mask=None if mask is None else mask.to(model.device),
        position_ids=positions.to(model.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def find_budget(model: PreTrainedModel) -> int:
    """Return how many bytes the keys and values of running answers may take.

    Half of what a GPU has free; on a CPU `WEIGHTS_SHARE` of the weights' bytes, at least `LEAST_BUDGET`.
    """
    if model.device.type == "cuda":
        return torch.cuda.mem_get_info(model.device)[0] // 2
    return max(LEAST_BUDGET, int(WEIGHTS_SHARE * sum(each.nbytes for each in model.parameters())))


class RunningBatch:
    """Answers that are decoded together.

    Args:
        max_total: largest number of tokens of a prompt and its answer together.
        budget: bytes of keys and values; one answer alone may take more.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: ResponseSpec,
        max_total: int,
        end_tokens: frozenset[int],
        steps: LlamaSteps | None,
        budget: int,
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._max_total = max_total
        self._end_tokens = end_tokens
        self._kept: Kept = ModelCache(model) if steps is None else LlamaAnswers(steps)
        self._compact_below = COMPACT_BELOW if steps is None else COMPACT_STEPS_BELOW
        self._budget = budget
        self._size: RowSize | None = None
        self._joinable = True
        self._rows: list[Row] = []
        self._put_back: deque[Row] = deque()
        self._frame = Frame(torch.empty(0, dtype=torch.int64), 0, 0)
        self._seen: Tensor | None = None
        self._made = self._ends = 0

    def run(self, waiting: deque[AskedPrompt]) -> Iterator[Advance]:
        """Answer what is waiting, from its left, and what is added meanwhile; yield after each pass of the model."""
        if waiting:
            self._measure(1)
        while waiting or self._put_back or self._running:
            taken = self._take(waiting)
            if taken:
                yield from self._read_and_join(taken)
            if self._running:
                yield self._step()

    @property
    def _running(self) -> list[Row]:
        return [row for row in self._rows if not row.ended]

    def _take(self, waiting: deque[AskedPrompt]) -> list[Row]:
        """Take the prompts that join now: as many as there is room for, or none while they would be few."""
        running = self._running
        free, enough = self._sampling.batch_size - len(running), max(1, JOIN_SHARE * len(running))
        if free < enough or (running and not self._joinable):
            return []
        candidates = [*self._put_back, *map(self._open, islice(waiting, free))][:free]
        count = self._count_fitting(running, candidates)
        if count < enough and count < len(candidates):
            return []
        for _ in range(count):
            _ = self._put_back.popleft() if self._put_back else waiting.popleft()
        return candidates[:count]

    def _open(self, asked: AskedPrompt) -> Row:
        if not asked.prompt:
            raise CaptureError(f"sample {asked.sample_id}: the prompt of turn {asked.turn} is empty")
        limit = min(self._sampling.max_new_tokens, self._max_total - len(asked.prompt))
        return Row(asked, limit, ended=limit <= 0)

    def _count_fitting(self, running: Sequence[Row], candidates: Sequence[Row]) -> int:
        """Return how many of these may join: their tokens, and those that are expected, are within the budget."""
        width = max((row.held for row in running), default=0)
        more = max((row.left for row in running), default=0)
        for count, row in enumerate(candidates):
            width, more = max(width, row.held + 1), max(more, row.left)
            rows = len(running) + count + 1
            if rows > 1 and rows * self._measure(width + self._expect(more)) > self._budget:
                return count
        return len(candidates)

    def _expect(self, limit: int) -> int:
        """Return how many tokens more to reckon with: the mean so far, once answers have ended; no kind that only leaves
        can give its place up."""
        if not self._joinable or not self._ends:
            return limit
        return min(limit, max(GROWTH, self._made // self._ends))

    def _measure(self, width: int) -> int:
        """Return the bytes of a row; a first call runs the model for one token."""
        if self._size is None:
            cache = make_growing_cache(self._model)
            one = torch.zeros(1, 1, dtype=torch.int64)
            run_model(self._model, one, None, one, cache)
            self._size, self._joinable = RowSize.of(cache), is_joinable(cache)
            column = self._size.count_bytes(width) / width
            log.info(
                "keys and values of answers: at most %d MB, %d tokens; at most %d answers at a time",
                self._budget >> 20,
                self._budget / column,
                self._sampling.batch_size,
            )
        return self._size.count_bytes(width)

    def _read_and_join(self, rows: Sequence[Row]) -> Iterator[Advance]:
        """Read prompts in groups, each of which joins before the next is read: two of them would not fit one's memory."""
        without_room = [row for row in rows if row.ended]
        if without_room:
            yield self._tell(without_room, 0, 0)
        for part in self._cut([row for row in rows if not row.ended]):
            self._join(self._read(part))
            yield self._tell(part, sum(row.held for row in part), len(part))

    def _cut(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """Yield prompts that are read together: of about the same length, where rows of different lengths can join."""
        group: list[Row] = []
        for row in sorted(rows, key=lambda row: -row.held):
            longest = group[0].held + 1 if group else 0
            fits = (len(group) + 1) * longest <= READ_TOKENS and row.held + 1 >= (1 - READ_WASTE) * longest
            if group and self._joinable and not fits:
                yield group
                group = []
            group.append(row)
        if group:
            yield group

    def _read(self, rows: Sequence[Row]) -> _Group:
        width = max(row.held for row in rows) + 1
        ids = torch.zeros(len(rows), width, dtype=torch.int64)  # (B, S)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            tokens = [*row.asked.prompt, *row.ids]
            ids[index, width - len(tokens) :] = torch.as_tensor(tokens, dtype=torch.int64)
            mask[index, width - len(tokens) :] = 1
        cache = make_growing_cache(self._model)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        for row in rows:
            if row.uniforms is None:
                row.uniforms = draw_uniforms(self._sampling, row.asked.sample_id, row.asked.turn)
        logits = run_model(self._model, ids, None if bool(mask.all()) else mask, positions, cache)
        seen = self._mark_seen(ids, mask, logits) if self._sampling.repetition_penalty != 1 else None
        self._choose(rows, logits, seen)
        chosen = torch.tensor([index for index, row in enumerate(rows) if not row.ended], dtype=torch.int64)
        seen = None if seen is None else seen[chosen.to(seen.device)]
        return _Group(cache, [row for row in rows if not row.ended], chosen, seen)

    def _mark_seen(self, ids: Tensor, mask: Tensor, logits: Tensor) -> Tensor:
        seen = torch.zeros(logits.shape, dtype=torch.bool)  # (B, V)
        for into, row, valid in zip(seen, ids, mask, strict=True):
            into[row[valid.bool()]] = True
        return seen.to(logits.device)

    def _choose(self, rows: Sequence[Row], logits: Tensor, seen: Tensor | None) -> None:
        """Append the next token to each row that has not ended."""
        uniforms = None
        if self._sampling.temperature > 0:
            numbers = [
                row.uniforms[min(len(row.ids), len(row.uniforms) - 1)] for row in rows if row.uniforms is not None
            ]
            uniforms = torch.tensor(numbers, dtype=torch.float64)
        tokens = choose_next_tokens(logits, seen, uniforms, self._sampling).cpu()
        if seen is not None:
            seen.scatter_(1, tokens[:, None].to(seen.device), True)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if not row.ended:
                row.take(token, self._end_tokens)

    def _join(self, group: _Group) -> None:
        """Let prompts that were read join, and ended answers leave."""
        if not group.rows:
            return
        keep = torch.tensor([index for index, row in enumerate(self._rows) if not row.ended], dtype=torch.int64)
        self._rows = [*self._running, *group.rows]
        width = max(row.held for row in self._rows)
        starts = torch.tensor([width - row.held for row in self._rows])
        self._frame = Frame(starts, width, max(row.left for row in self._rows))
        self._kept.join(keep, [group.cache], [group.chosen], self._frame)
        if group.seen is not None:
            before = [] if self._seen is None else [self._seen[keep.to(self._seen.device)]]
            self._seen = torch.cat([*before, group.seen])

    def _step(self) -> Advance:
        """Decode a token of each row, then remove ended rows if they are many."""
        self._give_up_places()
        if len(self._running) < self._compact_below * len(self._rows):
            self._keep(list_rows_to_keep([not row.ended for row in self._rows]))
        before = self._running
        tokens = torch.tensor([row.ids[-1] for row in self._rows])
        frame = self._frame
        logits = self._kept.step(tokens, frame.width - frame.starts, frame)
        self._frame = Frame(frame.starts, frame.width + 1, frame.more - 1)
        self._choose(self._rows, logits, self._seen)
        return self._tell(before, 0, len(before))

    def _give_up_places(self) -> None:
        """Put the youngest answers back to the waiting ones while all together take more than the budget."""
        running = self._running
        while self._joinable and len(running) > 1 and len(running) * self._measure(self._frame.width) > self._budget:
            youngest = min(running, key=lambda row: len(row.ids))
            running.remove(youngest)
            self._put_back.append(youngest)
            self._keep([index for index, row in enumerate(self._rows) if row in running])

    def _keep(self, indices: Sequence[int]) -> None:
        keep = torch.tensor(indices)
        self._rows = [self._rows[index] for index in indices]
        self._kept.keep(keep)
        self._frame = Frame(self._frame.starts[keep], self._frame.width, self._frame.more)
        if self._seen is not None:
            self._seen = self._seen[keep.to(self._seen.device)]

    def _tell(self, rows: Sequence[Row], read: int, made: int) -> Advance:
        ended = [row for row in rows if row.ended]
        self._made += made
        self._ends += len(ended)
        return Advance(tuple(row.make_answer() for row in ended), read, made)


def list_rows_to_keep(alive: Sequence[bool]) -> list[int]:
    """Return the rows that are alive, the last ones of them in the places of rows that are not."""
    count = sum(alive)
    moved = iter([row for row in range(count, len(alive)) if alive[row]])
    return [row if alive[row] else next(moved) for row in range(count)]
