"""Forward hook inside SGLang that hands over hidden states as they are computed.

It runs in SGLang's environment and needs torch and safetensors only. SGLang loads it by its option for forward hooks
and calls it after the logits layer, where the tapped streams and the last hidden state of every token are available. It
is the only module of Draftworks that uses SGLang's internal types, those of the versions in
draftworks.sglang.environment.
"""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftworks.errors import DraftworksError
from draftworks.sglang.spool import Part, PartSink, SpoolSink, is_captured, wants_logits

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

    def put(self, request_id: str, part: Part) -> None:
        """Announce a part and queue it. Wait for room first; tensors may be of any layout, on any device."""
        nbytes = part.nbytes
        with self._changed:
            self._changed.wait_for(lambda: not self._nbytes or self._nbytes + nbytes <= self._queue_bytes)
        self._sink.announce(request_id, part.start)
        copied = self._copy(request_id, part)
        with self._changed:
            self._nbytes += nbytes
            self._waiting.append(copied)
            self._changed.notify_all()
            if self._thread is None:  # in the process that runs the model: SGLang starts others beside it
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
        }  # buffers of SGLang
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


FORMER_FACTORY = "draftworks.serving.sglang_hook:capture_hook"
"""Former import path of the hook, which servers that were started with an earlier version still report."""


class SGLangCaptureBackend:
    """Forward hook that hands over the parts of Draftworks' requests; SGLang calls it at every forward pass.

    It never raises, because an error here would end the engine; the waiting reader finds the reason in the sink. Parts
    are written in the background, `queue_bytes` of them at a time.
    """

    def __init__(self, sink: PartSink, queue_bytes: int = QUEUE_BYTES) -> None:
        self.hand_over = BackgroundHandOver(sink, queue_bytes)

    def __call__(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        try:
            batch = _find_prefill(args)
            if batch is not None:
                self.write(batch, output)
        except Exception:
            log.exception(
                "draftworks: hidden states were not written, and the requests that wait for them are not known"
            )

    def write(self, batch: Any, output: Any) -> None:
        """Announce and queue the parts of Draftworks' requests in a prefill.

        Args:
            batch: SGLang's `ForwardBatch`.
            output: SGLang's `LogitsProcessorOutput`: `hidden_states` (N, k * H) and `last_hidden_states` (N, H) for N
                positions, the requests of the batch one after another.
        """
        ours = [request_id for request_id in batch.rids if is_captured(request_id)]
        try:
            for request_id, part in _split_requests(batch, output):
                self.hand_over.put(request_id, part)
        except Exception:
            reason = traceback.format_exc()
            log.error("draftworks: hidden states were not written:\n%s", reason)
            for request_id in ours:
                self.hand_over.fail(request_id, reason)


def capture_hook(config: dict[str, Any]) -> SGLangCaptureBackend:
    """Create the hook; SGLang calls this with the `config` of `format_hook_option`."""
    return SGLangCaptureBackend(_make_sink(config), config.get("queue_bytes", QUEUE_BYTES))


def format_hook_option(spool: Path, mooncake: Path | None = None) -> str:
    """Return the value of SGLang's option `--forward-hooks` that loads the hook.

    Args:
        mooncake: address file of the Mooncake store that hidden states go through, instead of the spool.
    """
    config = {"spool": str(spool)} if mooncake is None else {"mooncake": str(mooncake)}
    hook = {
        "name": "draftworks-capture",
        "target_modules": ["logits_processor", "*.logits_processor"],  # wrappers nest it under `language_model`
        "hook_factory": f"{__name__}:{capture_hook.__name__}",
        "config": config,
    }
    return json.dumps([hook])


def find_spool(hooks: Sequence[Mapping[str, Any]]) -> Path | None:
    """Return the spool folder of the capture hook among a server's loaded hooks; None if it has none or is not there."""
    spool = _find_config(hooks).get("spool")
    return None if spool is None else Path(spool)


def uses_mooncake(hooks: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the capture hook is among a server's loaded hooks and hands over through Mooncake."""
    return "mooncake" in _find_config(hooks)


def _find_config(hooks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    ours = (f"{__name__}:{capture_hook.__name__}", FORMER_FACTORY)
    return next((hook["config"] for hook in hooks if hook.get("hook_factory") in ours), {})


def _make_sink(config: Mapping[str, Any]) -> PartSink:
    if "mooncake" not in config:
        return SpoolSink(Path(config["spool"]))
    from draftworks.sglang.mooncake_parts import MooncakeSink  # needs Mooncake, which few environments have

    return MooncakeSink(Path(config["mooncake"]))


def _find_prefill(args: Sequence[Any]) -> Any:
    """Return SGLang's `ForwardBatch` of a prefill among the hook's arguments.

    The result is None for decoding, for a warm-up, and on a tensor-parallel rank other than the first, which holds
    copies of the same states.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch  # pyright: ignore[reportMissingImports]

    batch = next((each for each in args if isinstance(each, ForwardBatch)), None)
    if batch is None or not batch.forward_mode.is_extend() or not batch.rids or not _is_first_rank():
        return None
    return batch


def _split_requests(batch: Any, output: Any) -> Iterator[tuple[str, Part]]:
    """Yield the id and the part of each of Draftworks' requests in a packed batch."""
    lengths = batch.extend_seq_lens_cpu
    ends = list(accumulate(lengths))
    if output.last_hidden_states is None or output.hidden_states is None:
        raise ValueError("SGLang kept no hidden states: start it with --enable-return-aux-hidden-states")
    if output.last_hidden_states.shape[0] < ends[-1]:
        raise ValueError(
            f"SGLang kept hidden states of {output.last_hidden_states.shape[0]} positions, expected {ends[-1]}"
        )
    requests = zip(batch.rids, batch.extend_prefix_lens_cpu, lengths, ends, strict=True)
    for index, (request_id, start, length, end) in enumerate(requests):
        if is_captured(request_id):
            here = slice(end - length, end)  # T positions of this request, of the N of the batch
            logits: Tensor | None = output.next_token_logits[index] if wants_logits(request_id) else None  # (V,)
            ids = batch.input_ids[here].long()  # (T,)
            last = output.last_hidden_states[here]  # (T, H)
            yield request_id, Part(start, ids, _split_taps(output.hidden_states[here], last.shape[1]), last, logits)


def _split_taps(taps: Tensor, width: int) -> Tensor:
    """Return the taps (T, k * H), which lie side by side, as a view (k, T, H)."""
    if taps.shape[1] % width:
        raise ValueError(f"SGLang kept taps of {taps.shape[1]} columns, expected a multiple of {width}")
    return taps.unflatten(1, (-1, width)).transpose(0, 1)


def _is_first_rank() -> bool:
    from sglang.srt.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

    return get_tp_group().rank_in_group == 0
