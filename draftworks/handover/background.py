"""Handing over in the background: the engine goes on while a thread of its process writes hidden states.

It runs in the engine's environment and needs torch and safetensors only; Mooncake only where hidden states go through it.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftworks.errors import DraftworksError
from draftworks.handover.spool import Part, PartSink, SpoolSink

QUEUE_BYTES = 1 << 30
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Copied:
    """A part in main memory, whole once `ready` is over; None where nothing is on its way."""

    request_id: str
    part: Part
    ready: torch.cuda.Event | None


class BackgroundHandOver:
    """Hands parts to a sink in a daemon thread, so that the engine goes on with the next batch.

    Tensors are copied at once, because the engine may use their memory again: on a GPU into pinned memory, on a stream of
    its own. Parts that wait take at most `queue_bytes` of memory, or one part; a full queue blocks `put`, and with it the
    forward pass. No part is lost without a reason in the sink.
    """

    def __init__(self, sink: PartSink, queue_bytes: int = QUEUE_BYTES) -> None:
        self._sink = sink
        self._queue_bytes = queue_bytes
        self._changed = threading.Condition()
        self._waiting: deque[_Copied] = deque()
        self._nbytes = 0
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def announce(self, request_id: str, start: int) -> None:
        """Let the reader know that a part will follow, or a failure; for engines that answer before it is put."""
        self._sink.announce(request_id, start)

    def put(self, request_id: str, part: Part, announced: bool = False) -> None:
        """Queue a part, announced first unless it was. Wait for room; tensors may be of any layout, on any device."""
        nbytes = part.nbytes
        with self._changed:
            self._changed.wait_for(lambda: not self._nbytes or self._nbytes + nbytes <= self._queue_bytes)
        if not announced:  # a reader that has given up meanwhile has removed the mark
            self._sink.announce(request_id, part.start)
        copied = self._copy(request_id, part)
        with self._changed:
            self._nbytes += nbytes
            self._waiting.append(copied)
            self._changed.notify_all()
            if self._thread is None:  # in the process that runs the model: engines start others beside it
                self._thread = threading.Thread(target=self._run, name="draftworks-hand-over", daemon=True)
                self._thread.start()

    def fail(self, request_id: str, reason: str) -> None:
        try:
            self._sink.fail(request_id, reason)
        except Exception:
            log.exception("draftworks: nobody could be told that hidden states of %s were not written", request_id)

    def flush(self) -> None:
        """Wait until everything that was put is written or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._nbytes)

    def _copy(self, request_id: str, part: Part) -> _Copied:
        tensors = part.list_tensors()
        device = part.last.device
        if device.type != "cuda":
            copies = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for name, tensor in tensors.items()
            }
            return _Copied(request_id, Part.from_tensors(part.start, copies), None)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        small = {
            name: tensors[name].clone() for name in ("input_ids", "logits") if name in tensors
        }  # buffers of the engine
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copies = {name: _copy_to_pinned(tensor, stream) for name, tensor in {**tensors, **small}.items()}
            ready = torch.cuda.Event()
            ready.record(stream)
        return _Copied(request_id, Part.from_tensors(part.start, copies), ready)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                copied = self._waiting.popleft()
            try:
                if copied.ready is not None:
                    copied.ready.synchronize()
                self._sink.write(copied.request_id, copied.part)
            except BaseException as error:
                told = isinstance(error, (OSError, DraftworksError))  # what a person can put right needs no traceback
                reason = f"{type(error).__name__}: {error}" if told else traceback.format_exc()
                log.error("draftworks: hidden states were not written:\n%s", reason)
                self.fail(copied.request_id, reason)
            finally:
                nbytes = copied.part.nbytes
                del copied
                with self._changed:
                    self._nbytes -= nbytes
                    self._changed.notify_all()


def _copy_to_pinned(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    source = tensor.contiguous()
    copied = torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)
    tensor.record_stream(stream)
    return copied


def start_hand_over(destination: Mapping[str, Any]) -> BackgroundHandOver:
    """Return a hand-over to where `make_destination` says; `queue_bytes` there is optional.

    Raises:
        ConfigError, StoreError: see `MooncakeSink`.
    """
    return BackgroundHandOver(_make_sink(destination), destination.get("queue_bytes", QUEUE_BYTES))


def _make_sink(destination: Mapping[str, Any]) -> PartSink:
    if "mooncake" not in destination:
        return SpoolSink(Path(destination["spool"]))
    from draftworks.handover.mooncake_parts import MooncakeSink  # needs Mooncake, which few environments have

    return MooncakeSink(Path(destination["mooncake"]))
