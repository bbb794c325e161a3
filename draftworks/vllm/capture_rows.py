"""Rows of vLLM's cache of hidden states, from a finished request to its part. Needs torch only, and no vLLM.

vLLM keeps the tapped streams of a running request in blocks like keys and values: (B, k, S, H), with B blocks of S positions
and k streams in ascending order of their layers. Its scheduler says which blocks a finished request has, and its workers copy
them at the next step; until then the blocks are the request's. Chunked prefill needs no joining: all chunks are in the blocks.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftworks.handover.background import BackgroundHandOver
from draftworks.handover.spool import Part, find_request_id

log = logging.getLogger(__name__)

UNWANTED = ("FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR")
"""States of a finished request whose reader is gone, or was told another reason."""


@dataclass(frozen=True)
class FinishedRequest:
    """A request of Draftworks whose rows lie in vLLM's cache.

    Attributes:
        engine_id: as vLLM calls it: our id with additions in front and behind.
        request_id: as Draftworks calls it.
        input_ids: the prompt, T tokens.
        start: tokens of the prompt that came from the prefix cache, with rows of an earlier request.
        blocks: of the group that holds hidden states, in the order of the tokens.
    """

    engine_id: str
    request_id: str
    input_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]


class FinishedRequests:
    """The scheduler's side: what has finished since the last step.

    Args:
        group: which of a request's block tables is that of hidden states.
    """

    def __init__(self, hand_over: BackgroundHandOver, group: int) -> None:
        self._hand_over = hand_over
        self._group = group
        self._finished: list[FinishedRequest] = []
        self._cached: dict[str, int] = {}

    def note_cached(self, request: Any, tokens: int) -> None:
        """Note how many tokens of a waiting request came from the prefix cache; later notes count."""
        if tokens and find_request_id(request.request_id) is not None:
            self._cached[request.request_id] = tokens

    def add(self, request: Any, blocks: Sequence[Sequence[int]]) -> bool:
        """Announce the part of a finished request, before vLLM answers; return whether its blocks are still needed.

        Requests of others, and those that nobody waits for, are left alone. Never raises, because an error here would end
        the engine.

        Args:
            request: vLLM's `Request`.
            blocks: its block tables by group.
        """
        request_id, cached = find_request_id(request.request_id), self._cached.pop(request.request_id, 0)
        if request_id is None or request.status.name in UNWANTED:
            return False
        try:
            found = _describe(request, request_id, cached, blocks, self._group)
            self._hand_over.announce(request_id, found.start)
        except Exception as error:
            log.error("draftworks: hidden states were not written:\n%s", traceback.format_exc())
            self._hand_over.fail(request_id, f"{type(error).__name__}: {error}")
            return False
        self._finished.append(found)
        return True

    def take(self) -> tuple[FinishedRequest, ...]:
        """Return what has finished, for the workers' next step, and forget it."""
        finished, self._finished = tuple(self._finished), []
        return finished


def _describe(
    request: Any, request_id: str, cached: int, blocks: Sequence[Sequence[int]], group: int
) -> FinishedRequest:
    ids = tuple(request.prompt_token_ids or ())
    computed = int(request.num_computed_tokens)
    if not ids or computed < len(ids) or group >= len(blocks):
        raise ValueError(f"vLLM computed {computed} of {len(ids)} tokens before the request ended")
    return FinishedRequest(request.request_id, request_id, ids, cached, tuple(blocks[group]))


class CacheReader:
    """A worker's side: copies rows out of the cache and hands them over in the background.

    Args:
        cache: (B, k + 1, S, H), of any layout: the taps and the state before the final norm.
    """

    def __init__(self, hand_over: BackgroundHandOver, cache: Tensor) -> None:
        self._hand_over = hand_over
        self._cache = cache

    def hand_over(self, finished: Collection[FinishedRequest]) -> set[str]:
        """Copy the rows of requests, and return vLLM's ids of them: their blocks are free.

        Waits where the queue is full. Never raises; whoever waits for a part finds the reason where it would have come.
        """
        for request in finished:
            try:
                part = make_part(read_rows(self._cache, request.blocks, len(request.input_ids)), request)
                self._hand_over.put(request.request_id, part, announced=True)
            except Exception:
                reason = traceback.format_exc()
                log.error("draftworks: hidden states were not written:\n%s", reason)
                self._hand_over.fail(request.request_id, reason)
        return {request.engine_id for request in finished}


def read_rows(cache: Tensor, blocks: Sequence[int], length: int) -> Tensor:
    """Return a copy of the first `length` positions of some blocks, (k, T, H), on the cache's device.

    Raises:
        ValueError: the blocks have fewer positions.
    """
    streams, size, width = cache.shape[1:]
    if len(blocks) * size < length:
        raise ValueError(f"{len(blocks)} blocks of {size} positions hold no {length} tokens")
    rows = cache.new_empty((streams, length, width))
    for number, block in enumerate(blocks[: -(-length // size)]):
        here = rows[:, number * size : (number + 1) * size]
        here.copy_(cache[block, :, : here.shape[1]])
    return rows


def make_part(rows: Tensor, request: FinishedRequest) -> Part:
    """Return the part of a request from its rows (k + 1, T, H), the last stream of which is before the final norm."""
    ids = torch.tensor(request.input_ids[request.start :], device=rows.device)
    return Part(request.start, ids, rows[:-1, request.start :], rows[-1, request.start :])
