"""Forward hook inside SGLang that hands over hidden states as they are computed.

It runs in SGLang's environment and needs torch and safetensors only. SGLang loads it by its option for forward hooks
and calls it after the logits layer, where the tapped streams and the last hidden state of every token are available. It
is the only module of Draftworks that uses SGLang's internal types, those of the versions in
draftworks.sglang.environment.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from draftworks.handover.background import BackgroundHandOver, start_hand_over
from draftworks.handover.destination import make_destination
from draftworks.handover.spool import Part, is_captured, wants_logits

log = logging.getLogger(__name__)

FORMER_FACTORY = "draftworks.serving.sglang_hook:capture_hook"
"""Former import path of the hook, which servers that were started with an earlier version still report."""


class SGLangCaptureBackend:
    """Forward hook that hands over the parts of Draftworks' requests; SGLang calls it at every forward pass.

    It never raises, because an error here would end the engine; the waiting reader finds the reason in the sink. Parts
    are written in the background.
    """

    def __init__(self, hand_over: BackgroundHandOver) -> None:
        self.hand_over = hand_over

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
    return SGLangCaptureBackend(start_hand_over(config))


def format_hook_option(spool: Path, mooncake: Path | None = None) -> str:
    """Return the value of SGLang's option `--forward-hooks` that loads the hook.

    Args:
        mooncake: address file of the Mooncake store that hidden states go through, instead of the spool.
    """
    hook = {
        "name": "draftworks-capture",
        "target_modules": ["logits_processor", "*.logits_processor"],  # wrappers nest it under `language_model`
        "hook_factory": f"{__name__}:{capture_hook.__name__}",
        "config": make_destination(spool, mooncake),
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
