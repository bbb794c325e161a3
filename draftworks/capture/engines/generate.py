"""Batched decoding in which the response to a prompt does not depend on the other prompts of the batch.

Prompts are padded on the left and decoded with a key-value cache; batch rows that have ended leave the batch. The
random numbers of a batch row come from (seed, sample id, turn) alone, one per token, and choose a token by inversion of
the cumulative distribution.

Small Llama models on a CPU take steps of their own (`llama_steps.py`). For all others the key-value cache grows in steps:
transformers' own dynamic cache concatenates at every token, which allocates and copies the whole cache each time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from draftworks.capture.engine import Generated
from draftworks.capture.engines.llama_steps import LlamaAnswers, LlamaSteps, find_steps
from draftworks.config.registry_files import ResponseSpec
from draftworks.errors import CaptureError

GROWTH = 64
"""Smallest number of tokens by which a cache buffer grows; a long cache grows by a quarter."""


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, as views of larger buffers (B, heads, room, D) that have space for more tokens."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            assert self.keys is not None, "lazy_initialization makes both"
            assert self.values is not None
            room = end + max(GROWTH, end // 4)
            self._buffers = (
                _grow_buffer(self.keys, key_states, start, room),
                _grow_buffer(self.values, value_states, start, room),
            )
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]  # (B, heads, end, D)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._buffers = None


def make_growing_cache(model: PreTrainedModel) -> DynamicCache:
    """Return the model's dynamic cache with its plain layers replaced by `GrowingLayer`; other kinds of layers stay.

    Sliding-window layers, for example, are not replaced. Batch rows are removed with `reorder_cache`, which layers with
    a recurrent state have too.
    """
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _grow_buffer(stored: Tensor, like: Tensor, length: int, room: int) -> Tensor:
    # (B, heads, room, D)
    buffer = torch.empty(*like.shape[:2], room, like.shape[-1], dtype=like.dtype, device=like.device)
    if length:
        buffer[:, :, :length] = stored
    return buffer


COMPACT_BELOW = 0.85
"""Ended batch rows are removed once fewer than this share is still decoding: copying the cache costs time too."""
COMPACT_STEPS_BELOW = 0.97
"""The same for `llama_steps`, which copies only the rows that take the place of ended ones."""
FEW = 256
"""Tokens that are sorted as fast with their order as without."""


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: ResponseSpec,
    sample_ids: Sequence[str],
    max_total: int,
    turn: int = 0,
    end_ids: Collection[int] = (),
) -> list[Generated]:
    """Let the model continue each prompt until it ends its turn.

    Args:
        sampling: limits and sampling options; `batch_size` prompts of similar length are decoded together.
        sample_ids: one per prompt; a batch row's random numbers derive from it and `turn`.
        max_total: largest number of tokens of prompt and response together.
        end_ids: ids that end a turn, in addition to those of the model's configuration.

    Returns:
        Responses in the order of the prompts. A prompt that leaves no room gets an empty, unfinished response.

    Raises:
        CaptureError: a prompt is empty.
    """
    for sample_id, prompt in zip(sample_ids, prompts, strict=True):
        if not prompt:
            raise CaptureError(f"sample {sample_id}: the prompt of turn {turn} is empty")
    end_tokens = find_end_tokens(model).union(end_ids)
    steps = find_steps(model)
    results = [Generated((), finished=False)] * len(prompts)
    by_length = sorted((i for i, p in enumerate(prompts) if len(p) < max_total), key=lambda i: len(prompts[i]))
    for start in range(0, len(by_length), sampling.batch_size):
        indices = by_length[start : start + sampling.batch_size]
        decodings = [
            _Decoding(
                i,
                min(sampling.max_new_tokens, max_total - len(prompts[i])),
                draw_uniforms(sampling, sample_ids[i], turn),
            )
            for i in indices
        ]
        decoder = _Decoder(model, [prompts[i] for i in indices], decodings, sampling, end_tokens, steps)
        decoder.run()
        for decoding in decodings:
            results[decoding.index] = Generated(tuple(decoding.ids), decoding.finished)
    return results


def draw_uniforms(sampling: ResponseSpec, sample_id: str, turn: int) -> np.ndarray:
    """Return the random numbers of a batch row in [0, 1), one per new token, float64; empty for greedy decoding."""
    if sampling.temperature == 0:
        return np.empty(0)
    key = sha256(f"{sampling.seed}/{turn}/{sample_id}".encode()).digest()
    return np.random.default_rng(list(key)).random(sampling.max_new_tokens)


def choose_next_tokens(logits: Tensor, seen: Tensor | None, uniforms: Tensor | None, sampling: ResponseSpec) -> Tensor:
    """Return one token id per batch row, (B,). The order of the transformations is that of transformers.

    Args:
        logits: (B, V).
        seen: (B, V) bool, tokens of the prompt and of the response so far; None without repetition penalty.
        uniforms: (B,) float64 in [0, 1); None for greedy decoding.
    """
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if uniforms is None:
        return torch.from_numpy(logits.numpy().argmax(-1)) if _suits_numpy(logits) else logits.argmax(-1)
    logits = logits.float() / sampling.temperature
    ids = None  # of the columns, if these are not the whole vocabulary
    if 0 < sampling.top_k < logits.shape[-1]:
        least = _find_kth_largest(logits, sampling.top_k)
        places = _list_places(logits >= least)
        if len(places) == least.numel() * sampling.top_k:
            ids = places.view(len(logits), -1) % logits.shape[-1]  # (B, top_k), ascending
            logits = logits.gather(-1, ids)
        else:  # as likely as the last of them are others too, which count
            logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        logits = logits.masked_fill(_find_beyond(logits, sampling.top_p), -torch.inf)
    cumulative = logits.double().softmax(-1).cumsum(-1)  # (B, V), or (B, top_k)
    picked = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1].cpu()).to(logits.device)[:, None], right=True)
    picked = picked.clamp(max=logits.shape[-1] - 1)  # (B, 1)
    return (picked if ids is None else ids.gather(-1, picked))[:, 0]


def _suits_numpy(tensor: Tensor) -> bool:
    """Whether numpy can read it. On a CPU it finds the largest values of rows, and true ones, several times as fast."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bool)


def _find_kth_largest(logits: Tensor, k: int) -> Tensor:
    """Return the k-th largest value of each row, (B, 1)."""
    if _suits_numpy(logits):
        place = logits.shape[-1] - k
        return torch.from_numpy(np.partition(logits.numpy(), place, axis=-1)[:, place : place + 1])
    return logits.topk(k).values[:, -1:]


def _find_beyond(logits: Tensor, top_p: float) -> Tensor:
    """Return which tokens are beyond the most likely ones that together have a share of `top_p`, (B, V) bool.

    Of equally likely tokens the first count as more likely. Where no such token decides, sorted values tell as much as
    their order, and numpy sorts values in a tenth of the time.
    """
    if _suits_numpy(logits) and logits.shape[-1] > FEW:
        ordered = torch.from_numpy(np.sort(logits.numpy(), axis=-1)[:, ::-1].copy())
        beyond = _is_beyond(ordered, top_p)
        found = logits < ordered.masked_fill(beyond, torch.inf).amin(-1, keepdim=True)
        if torch.equal(found.sum(-1), beyond.sum(-1)):
            return found
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    beyond = _is_beyond(ordered, top_p)
    return beyond.scatter(-1, order, beyond)


def _is_beyond(ordered: Tensor, top_p: float) -> Tensor:
    mass = ordered.softmax(-1)
    return mass.cumsum(-1) - mass >= top_p


def _list_places(found: Tensor) -> Tensor:
    """Return where a matrix is true, as places in its rows one after another."""
    if _suits_numpy(found):
        return torch.from_numpy(np.flatnonzero(found.numpy()))
    return found.flatten().nonzero()[:, 0]


def find_end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that end a turn, from the generation configuration or else from the model's configuration."""
    ids: Any = None
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None) if ids is None else ids
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def list_rows_to_keep(alive: Sequence[bool]) -> list[int]:
    """Return the rows that are alive, the last ones of them in the places of rows that are not."""
    count = sum(alive)
    moved = iter([row for row in range(count, len(alive)) if alive[row]])
    return [row if alive[row] else next(moved) for row in range(count)]


@dataclass
class _Decoding:
    """State of one prompt's response while it is decoded.

    Attributes:
        index: index of the prompt among all prompts.
        limit: largest number of new tokens.
        uniforms: random numbers, one per new token; empty for greedy decoding.
    """

    index: int
    limit: int
    uniforms: np.ndarray

    def __post_init__(self) -> None:
        self.ids: list[int] = []
        self.finished = False

    def take(self, token: int, end_tokens: frozenset[int]) -> bool:
        """Append a token and return whether decoding goes on."""
        self.ids.append(token)
        self.finished = token in end_tokens
        return not self.finished and len(self.ids) < self.limit


class _Decoder:
    """Decoding of one batch. `_alive` holds, for each row of the current batch, whether it is still decoding."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        decodings: Sequence[_Decoding],
        sampling: ResponseSpec,
        end_tokens: frozenset[int],
        steps: LlamaSteps | None,
    ) -> None:
        self._model = model
        self._steps = steps
        self._answers: LlamaAnswers | None = None
        self._sampling = sampling
        self._end_tokens = end_tokens
        self._decodings = list(decodings)
        self._alive = [True] * len(decodings)
        self._cache = make_growing_cache(model)
        width = max(len(prompt) for prompt in prompts)
        self._ids = torch.zeros(len(prompts), width, dtype=torch.int64)  # (B, S), later (B, 1)
        self._mask = torch.zeros_like(self._ids)  # (B, S), one column more per new token
        for index, prompt in enumerate(prompts):
            self._ids[index, width - len(prompt) :] = torch.as_tensor(prompt, dtype=torch.int64)
            self._mask[index, width - len(prompt) :] = 1
        self._position = (self._mask.cumsum(-1) - 1).clamp(min=0)  # (B, S), later (B, 1)
        self._padded = bool((self._mask == 0).any())
        self._seen = self._mark_seen_tokens() if sampling.repetition_penalty != 1 else None

    def run(self) -> None:
        while any(self._alive):
            tokens = self._step()
            self._alive = [
                alive and decoding.take(token, self._end_tokens)
                for decoding, alive, token in zip(self._decodings, self._alive, tokens.tolist(), strict=True)
            ]
            self._advance(tokens)

    def _step(self) -> Tensor:
        """Return the next token of each row, (B,)."""
        logits = self._compute_logits()
        return choose_next_tokens(logits, self._seen, self._collect_uniforms(), self._sampling).cpu()

    def _compute_logits(self) -> Tensor:
        """Return the logits of the last token of each row, (B, V)."""
        if self._answers is not None:
            return self._answers.step(self._ids[:, 0], self._position[:, 0])
        device = self._model.device
        output = self._model(
            input_ids=self._ids.to(device),
            attention_mask=self._mask.to(device) if self._padded else None,
            position_ids=self._position.to(device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if self._steps is not None:
            more = max(each.limit for each in self._decodings)
            self._answers = self._steps.begin(self._cache, self._mask, more)
        return output.logits[:, -1]  # (B, 1, V) to (B, V)

    def _collect_uniforms(self) -> Tensor | None:
        if self._sampling.temperature == 0:
            return None
        numbers = [each.uniforms[min(len(each.ids), len(each.uniforms) - 1)] for each in self._decodings]
        return torch.tensor(numbers, dtype=torch.float64)

    def _advance(self, tokens: Tensor) -> None:
        self._ids = tokens[:, None]  # (B,) to (B, 1)
        if self._answers is None:
            self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], dim=1)
        self._position = self._position[:, -1:] + 1  # (B, 1)
        if self._seen is not None:
            self._seen.scatter_(1, self._ids.to(self._seen.device), True)
        share = COMPACT_BELOW if self._answers is None else COMPACT_STEPS_BELOW
        if any(self._alive) and sum(self._alive) < share * len(self._alive):
            self._compact()

    def _compact(self) -> None:
        keep = torch.tensor(list_rows_to_keep(self._alive))
        self._decodings = [self._decodings[index] for index in keep.tolist()]
        self._alive = [True] * len(keep)
        if self._answers is not None:
            self._answers.keep(keep)
        else:
            self._cache.reorder_cache(cast(torch.LongTensor, keep.to(self._model.device)))
        self._ids, self._mask, self._position = self._ids[keep], self._mask[keep], self._position[keep]
        if self._seen is not None:
            self._seen = self._seen[keep.to(self._seen.device)]

    def _mark_seen_tokens(self) -> Tensor:
        head = self._model.get_output_embeddings()
        assert head is not None  # a causal language model has one
        vocab_size = head.weight.shape[0]
        seen = torch.zeros(len(self._ids), vocab_size, dtype=torch.bool)  # (B, V)
        for index, (ids, mask) in enumerate(zip(self._ids, self._mask, strict=True)):
            seen[index, ids[mask.bool()]] = True
        return seen.to(self._model.device)
