"""The next token of each row of a batch, by the row's own random numbers.

The random numbers of a row come from (seed, sample id, turn) alone, one per token, and choose a token by inversion of the
cumulative distribution: the answer to a prompt does not depend on the other prompts of the batch.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from draftworks.config.registry_files import ResponseSpec

FEW = 256
"""Tokens that are sorted as fast with their order as without."""


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
