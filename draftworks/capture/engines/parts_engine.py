"""Engines in software of their own, which runs the target and hands its hidden states over in parts.

Every answer is checked against its request: such software silently loses the hidden states of positions when it finds a
prefix in its cache, or cuts a prompt into chunks.
"""

from __future__ import annotations

import logging
import threading
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential
from torch import Tensor

from draftworks.capture.background import run_in_background
from draftworks.capture.engine import Generated, TargetEngine, check_sequences, find_backend
from draftworks.capture.engines.hosts import EngineHost
from draftworks.config.registry_files import ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import AbortedRequestError, CaptureError, EngineError, PassingTroubleError, UnsoundEngineError
from draftworks.features.contracts import CaptureConfig
from draftworks.handover.spool import AnsweredRequest, Part, make_request_id
from draftworks.servers.client import GenerateRequest, Generation
from draftworks.servers.environment import EngineSoftware
from draftworks.storage.identity import EngineIdentity, LayerTap

_LONGEST_WAIT_S = 30.0
_EXTRA_ATTEMPTS = 4
"""Additional attempts after errors that pass without a revival of the server."""

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Losses:
    """What to do where software gave no part, or not all positions, as its users know it.

    Attributes:
        nothing: what hands over there, and how to see that it is loaded.
        cached: its option that switches the prefix cache off.
        chunks: its option that keeps prompts whole; empty if parts are whole in any case.
    """

    nothing: str
    cached: str
    chunks: str = ""


@dataclass(frozen=True)
class AnsweredPart:
    """The part of a captured sequence, and the software's answer to it."""

    part: Part
    answer: Generation


class PartsEngine(TargetEngine):
    """A target engine in software of its own.

    Args:
        host: the software that runs the target; `close` closes it.
        head: reads the target's output matrix (V, H), once and only for verification.
        attempts: number of attempts for a batch; the host is revived between two of them.
        dtype: compute dtype that the hidden states must have.
    """

    software: ClassVar[EngineSoftware]
    losses: ClassVar[Losses]
    concurrent = True
    batches_in_flight_limit = None

    def __init__(
        self,
        target: TargetFiles,
        identity: EngineIdentity,
        host: EngineHost[Any],
        head: Callable[[], Tensor] | None = None,
        attempts: int = 3,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.identity = identity
        self.last_hidden = find_backend(self.backend).last_hidden
        self._target = target
        self._host = host
        self._read_head = head
        self._head: Tensor | None = None
        self._attempts = attempts
        self._dtype = dtype
        self._reviving = threading.Lock()
        self._revivals = 0
        self._failed_revival: EngineError | None = None
        self._cancellations = 0
        self._closed = False
        self.tested = host.version.partition("+")[0] in self.software.versions
        self.replicas = host.replicas

    @property
    def display_name(self) -> str:
        url = getattr(self._host.client, "url", None)
        return f"{self.software.name} in this process" if url is None else f"{self.software.name} at {url}"

    def list_members(self) -> Sequence[PartsEngine]:
        hosts = self._host.list_members()
        return (self,) if len(hosts) == 1 else [self._make_member(host) for host in hosts]

    @abstractmethod
    def _make_member(self, host: EngineHost[Any]) -> PartsEngine:
        """Return an engine on one of several servers, which asks once."""

    @property
    def url(self) -> str:
        """Current address of the server; software in this process has none."""
        return self._host.client.url

    @property
    def spool(self) -> Path:
        """Folder where the software writes hidden states."""
        return self._host.spool

    def capture(self, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> list[dict[str, Tensor]]:
        readers = {tap.name: self._choose_reader(tap) for tap in taps}
        parts = [answered.part for answered in self._capture_parts(sequences)]
        return [
            {**{name: read(part) for name, read in readers.items()}, "last": self._read_last(part)} for part in parts
        ]

    def _choose_reader(self, tap: LayerTap) -> Callable[[Part], Tensor]:
        """Return what reads a tap's stream (S, H) out of a part; raise CaptureError if parts do not have it."""
        column = self._find_column(tap)
        return lambda part: part.taps[column]  # (k, S, H) to (S, H)

    def _read_last(self, part: Part) -> Tensor:
        """Return the state after the final norm, (S, H)."""
        return part.last

    def submit(self, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> Future[list[dict[str, Tensor]]]:
        """Begin a capture beside those that run: a server that has other requests waiting is never idle."""
        return run_in_background(self.capture, sequences, taps)

    def cancel(self, answers: Collection[Future[list[dict[str, Tensor]]]]) -> None:
        """Let requests in flight fail without another attempt; a server cannot be asked to drop them."""
        self._cancellations += 1

    @property
    def bytes_in_flight_limit(self) -> int | None:
        return self._host.measure_room()

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the logits of the last position of each sequence, (1, V): such software computes no others."""
        return [self._read_logits(answered)[None] for answered in self._capture_parts(sequences, with_logits=True)]

    @abstractmethod
    def _read_logits(self, answered: AnsweredPart) -> Tensor:
        """Return the logits of the last position, (V,)."""

    @torch.inference_mode()
    def head_logits(self, last: Tensor) -> Tensor:
        if self._head is None:
            if self._read_head is None:
                raise EngineError("this engine was loaded to generate, without the target's head")
            self._head = self._read_head()
        return last @ self._head.to(last.dtype).T  # (R, H) to (R, V)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: ResponseSpec,
        sample_ids: Sequence[str],
        max_total: int,
        turn: int = 0,
        end_ids: Collection[int] = (),
    ) -> list[Generated]:
        """Return responses to prompts like draftworks.capture.engines.generate, but the software does its own sampling."""
        for sample_id, prompt in zip(sample_ids, prompts, strict=True):
            if not prompt:
                raise CaptureError(f"sample {sample_id}: the prompt of turn {turn} is empty")
        room = min(max_total, self._target.context)
        fitting = [index for index, prompt in enumerate(prompts) if len(prompt) < room]
        check_sequences([prompts[index] for index in fitting], room, self._target.vocab_size)
        parameters = [
            self._build_sampling(sampling, f"{turn}/{sample_ids[index]}", room - len(prompts[index]), end_ids)
            for index in fitting
        ]
        results = [Generated((), finished=False)] * len(prompts)
        for index, answer in zip(fitting, self._generate([prompts[i] for i in fitting], parameters), strict=True):
            results[index] = Generated(answer.output_ids, finished=answer.finish == "stop")
        return results

    @abstractmethod
    def _build_sampling(
        self, sampling: ResponseSpec, seed_key: str, room: int, end_ids: Collection[int]
    ) -> dict[str, Any]:
        """Return the sampling options under the software's names.

        Args:
            seed_key: with the seed, the source of a request's random numbers.
            room: upper limit of new tokens, even if `sampling` allows more.
        """

    @abstractmethod
    def _build_prefill(self, with_logits: bool) -> dict[str, Any]:
        """Return the options of a request that only captures: one new token, the least that is possible."""

    def share_with_job(self) -> None:
        self._host.share_with_job()

    def close(self) -> None:
        """Close the host. Requests of other threads fail and are not tried again."""
        self._closed = True
        self._host.close()

    def _find_column(self, tap: LayerTap) -> int:
        if not 0 <= tap.hf_index < self._target.num_layers:
            raise CaptureError(
                f"layer taps [{tap.hf_index}] are outside the target: it has taps 0..{self._target.num_layers - 1}"
            )
        if tap.to_layer_output() not in self._host.layer_ids:
            served = [LayerTap.from_layer_output(layer).name for layer in self._host.layer_ids]
            raise CaptureError(
                f"tap {tap.name} is not among those that the server captures: {', '.join(served) or 'none'}"
            )
        return self._host.layer_ids.index(tap.to_layer_output())

    def _capture_parts(self, sequences: Sequence[Sequence[int]], with_logits: bool = False) -> list[AnsweredPart]:
        """Return the checked hidden states of every sequence."""
        check_sequences(sequences, self._target.context, self._target.vocab_size)
        taps = tuple(LayerTap.from_layer_output(layer).hf_index for layer in self._host.layer_ids)
        expected = CaptureConfig(taps, self._target.hidden_size, str(self._dtype).removeprefix("torch."))

        def attempt() -> list[AnsweredPart]:
            prefill = self._build_prefill(with_logits)
            requests = [GenerateRequest(make_request_id(with_logits), ids, prefill) for ids in sequences]
            request_ids = [request.request_id for request in requests]
            try:
                answers = self._host.client.generate(requests)
                answered = [
                    AnsweredRequest(request_id, answer.cached_tokens)
                    for request_id, answer in zip(request_ids, answers, strict=True)
                ]
                return [
                    AnsweredPart(self._require_whole(parts, ids, answer.cached_tokens, expected), answer)
                    for parts, ids, answer in zip(self._host.take_parts(answered), sequences, answers, strict=True)
                ]
            finally:
                self._host.discard_parts(request_ids)

        return self._retry(attempt)

    def _require_whole(
        self, parts: Sequence[Part], ids: Sequence[int], cached_tokens: int, expected: CaptureConfig
    ) -> Part:
        return require_whole_part(parts, ids, cached_tokens, expected, self.software.name, self.losses)

    def _generate(self, prompts: Sequence[Sequence[int]], parameters: Sequence[dict[str, Any]]) -> list[Generation]:
        def attempt() -> list[Generation]:
            requests = [
                GenerateRequest(uuid.uuid4().hex, prompt, own) for prompt, own in zip(prompts, parameters, strict=True)
            ]
            return self._host.client.generate(requests)

        return self._retry(attempt) if prompts else []

    def _retry(self, attempt: Callable[[], Result]) -> Result:
        """Call `attempt` until it succeeds or all attempts are used, with a revival of the server between attempts.

        Raises:
            CaptureError: the server aborted the request in the last attempt.
            EngineError: the last attempt failed, or an attempt failed with an error that is not worth another one.
        """
        revivals_before, cancellations_before = 0, self._cancellations

        def is_wanted() -> bool:
            return not self._closed and self._cancellations == cancellations_before

        def run_attempt() -> Result:
            nonlocal revivals_before
            revivals_before = self._revivals
            return attempt()

        retrying = Retrying(
            stop=self._should_stop,
            wait=wait_exponential(max=_LONGEST_WAIT_S),
            retry=retry_if_exception(lambda error: _is_worth_retrying(error) and is_wanted()),
            before_sleep=lambda state: self._revive(state, revivals_before),
            reraise=True,
        )
        try:
            return retrying(run_attempt)
        except AbortedRequestError as error:
            raise CaptureError(f"{error} ({self._attempts} times)") from error

    def _should_stop(self, state: RetryCallState) -> bool:
        """Return whether to stop; a busy server, or one with a full disk, gets more attempts than one that is gone."""
        error = state.outcome.exception() if state.outcome else None
        is_transient = isinstance(error, PassingTroubleError) and not isinstance(error, AbortedRequestError)
        return state.attempt_number >= self._attempts + (_EXTRA_ATTEMPTS if is_transient else 0)

    def _revive(self, state: RetryCallState, revivals_before: int) -> None:
        """Revive the server unless another thread has done so since the failed attempt began.

        After an error that passes by itself, nothing is revived.
        """
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, PassingTroubleError):
            log.warning("%s. Trying again", error)
            return
        with self._reviving:
            if not isinstance(error, EngineError) or self._revivals != revivals_before:
                return
            if self._failed_revival is not None:
                raise self._failed_revival  # of another thread, which has the first cause
            try:
                self._host.revive(error)
            except EngineError as failure:
                self._failed_revival = failure
                raise
            self._revivals += 1


def _is_worth_retrying(error: BaseException) -> bool:
    """Return whether a failed request may succeed when it is tried again."""
    return isinstance(error, EngineError) and not isinstance(error, UnsoundEngineError)


def require_whole_part(
    parts: Sequence[Part], ids: Sequence[int], cached_tokens: int, expected: CaptureConfig, name: str, losses: Losses
) -> Part:
    """Return the only part, after checking that it holds the hidden states of every position of a sequence.

    Args:
        ids: token ids of the sequence.
        expected: all streams that the server captures, together in a part: `taps` (k, S, H), `last` (S, H).
        name: the software, and `losses` what to do about it.

    Raises:
        UnsoundEngineError: the part has another width or dtype than expected.
        PassingTroubleError: there is no part.
        CaptureError: positions are missing, because of a prefix cache or a prompt in chunks, or the hidden states are
            those of other tokens.
    """
    if not parts:
        raise PassingTroubleError(
            f"{name} wrote no hidden states for a sequence of {len(ids)} tokens: expected a file from {losses.nothing}, "
            "that it writes to this spool, and that the disk has space left"
        )
    if cached_tokens or parts[0].start:
        raise CaptureError(
            f"{name} took {cached_tokens or parts[0].start} of a sequence's {len(ids)} tokens from its prefix cache "
            f"and has no hidden states of them. Start the server with {losses.cached}"
        )
    if len(parts) > 1 or len(parts[0].input_ids) != len(ids):
        lengths = [len(part.input_ids) for part in parts]
        raise CaptureError(
            f"{name} computed a sequence of {len(ids)} tokens in chunks of {lengths}, and loses hidden states between "
            f"them. {losses.chunks}"
        )
    part = parts[0]
    if part.input_ids.tolist() != list(ids):
        raise CaptureError(f"{name} computed other token ids than the {len(ids)} that were sent")
    if part.taps.shape[1] != len(ids) or len(part.last) != len(ids):
        raise CaptureError(
            f"expected hidden states of {len(ids)} positions, found {part.taps.shape[1]} (taps) and {len(part.last)} "
            "(last)"
        )
    width = expected.hidden_size
    for kind, found, streams in (("taps", part.taps, len(expected.aux_layer_ids)), ("last", part.last[None], 1)):
        dtype = str(found.dtype).removeprefix("torch.")
        if (len(found), found.shape[2], dtype) != (streams, width, expected.dtype):
            raise UnsoundEngineError(
                f"{name} wrote {kind} with {len(found)} x {found.shape[2]} columns in {dtype}, expected {streams} x "
                f"{width} in {expected.dtype} ({', '.join(expected.names)}, {width} each)"
            )
    return part
