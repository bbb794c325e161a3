"""Inside SGLang: writes hidden states to the spool as they are computed. Runs in the serving environment.

SGLang loads it by its own option for forward hooks and calls it after the layer that makes logits, where every token's
tapped streams and last hidden state are at hand. It is the only module of ours that knows SGLang's inner types, those of
the versions in draftworks.sglang.environment. Needs torch and safetensors only.
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

from draftworks.sglang.spool import Part, is_captured, wants_logits, write_failure, write_part

log = logging.getLogger(__name__)
FORMER_FACTORY = "draftworks.serving.sglang_hook:capture_hook"
"""The hook where it was before: a server that was started then runs on with it."""


class SGLangCaptureBackend:
    """The hook: called with every forward pass, writes the parts of our requests.

    It never raises, since an error here would end the engine: whoever waits finds the reason in the spool.

    Args:
        spool: existing folder; see draftworks.sglang.spool.
    """

    def __init__(self, spool: Path) -> None:
        self._spool = spool

    def __call__(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        try:
            batch = _find_prefill(args)
            if batch is not None:
                self.write(batch, output)
        except Exception:
            log.exception("draftworks: hidden states were not written, and nobody can be told")

    def write(self, batch: Any, output: Any) -> None:
        """Write the parts of our requests in a prefill.

        Args:
            batch: SGLang's `ForwardBatch`.
            output: SGLang's `LogitsProcessorOutput`, (rows, k * H) and (rows, H), the requests of the batch one after another.
        """
        ours = [request_id for request_id in batch.rids if is_captured(request_id)]
        try:
            for request_id, part in _split_requests(batch, output):
                write_part(self._spool, request_id, part)
        except Exception:
            reason = traceback.format_exc()
            log.error("draftworks: hidden states were not written:\n%s", reason)
            for request_id in ours:
                write_failure(self._spool, request_id, reason)


def capture_hook(config: dict[str, Any]) -> SGLangCaptureBackend:
    """What SGLang calls to make the hook; `config` is that of `format_hook_option`."""
    return SGLangCaptureBackend(Path(config["spool"]))


def format_hook_option(spool: Path) -> str:
    """The value of SGLang's option `--forward-hooks` that loads the hook."""
    hook = {
        "name": "draftworks-capture",
        "target_modules": ["logits_processor", "*.logits_processor"],  # wrappers nest it under `language_model`
        "hook_factory": f"{__name__}:{capture_hook.__name__}",
        "config": {"spool": str(spool)},
    }
    return json.dumps([hook])


def find_spool(hooks: Sequence[Mapping[str, Any]]) -> Path | None:
    """Where our hook writes, of the hooks that a server says it has loaded; None if ours is not among them."""
    ours = (f"{__name__}:{capture_hook.__name__}", FORMER_FACTORY)
    return next((Path(hook["config"]["spool"]) for hook in hooks if hook.get("hook_factory") in ours), None)


def _find_prefill(args: Sequence[Any]) -> Any:
    """SGLang's `ForwardBatch`; None for decoding, a warm-up, or a rank whose rows are copies of the first one's."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch  # pyright: ignore[reportMissingImports]

    batch = next((each for each in args if isinstance(each, ForwardBatch)), None)
    if batch is None or not batch.forward_mode.is_extend() or not batch.rids or not _is_first_rank():
        return None
    return batch


def _split_requests(batch: Any, output: Any) -> Iterator[tuple[str, Part]]:
    """Cut a packed batch into its requests."""
    lengths = batch.extend_seq_lens_cpu
    ends = list(accumulate(lengths))
    if output.last_hidden_states is None or output.hidden_states is None:
        raise ValueError("SGLang kept no hidden states: start it with --enable-return-aux-hidden-states")
    if output.last_hidden_states.shape[0] < ends[-1]:
        raise ValueError(f"SGLang kept {output.last_hidden_states.shape[0]} rows of {ends[-1]} tokens")
    rows = zip(batch.rids, batch.extend_prefix_lens_cpu, lengths, ends, strict=True)
    for index, (request_id, start, length, end) in enumerate(rows):
        if is_captured(request_id):
            here = slice(end - length, end)
            logits: Tensor | None = output.next_token_logits[index] if wants_logits(request_id) else None
            ids = batch.input_ids[here].long()
            yield request_id, Part(start, ids, output.hidden_states[here], output.last_hidden_states[here], logits)


def _is_first_rank() -> bool:
    from sglang.srt.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

    return get_tp_group().rank_in_group == 0
