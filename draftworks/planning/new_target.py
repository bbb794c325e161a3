"""The entry of a new target: what fits its model, data and machine, written as a short YAML with the reasons. Torch-free.

Rates and batches are starting points, from the training of SmolLM2-135M's draft (docs/real-model.md) and the defaults for
8 B, with nothing measured between; `draftworks compare` tells what another one is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from draftworks.config.strategies import resolve_strategy
from draftworks.targets.resolve import TargetShape

LARGE_VOCABULARY = 65_536
SMALL_DRAFT_VOCABULARY = 8_192
STEPS = 400
"""Optimizer steps that a training should have at least, where the data allows batches of two."""
_FEW_ROWS, _SOME_ROWS = 5_000, 100_000


@dataclass(frozen=True)
class NewTarget:
    """What is known of a target that is about to be written.

    Attributes:
        model: path as the entry names it, or a hub id.
        revision: commit of a hub id.
        gpus: 0 for the processor.
        rows: conversations of the data set; None if they could not be counted.
        max_conversations: of them to use; None: all.
        serve: engines in which the draft is to be served and counted.
    """

    model: str
    revision: str | None
    dataset: str
    strategies: tuple[str, ...]
    shape: TargetShape
    gpus: int
    rows: float | None
    max_conversations: int | None = None
    serve: tuple[str, ...] = ()

    @property
    def epochs(self) -> int:
        """Passes over the data: three where there is little of it, one where there is much."""
        rows = math.inf if self.rows is None else min(self.rows, self.max_conversations or math.inf)
        return 3 if rows < _FEW_ROWS else 2 if rows < _SOME_ROWS else 1

    @property
    def global_batch_size(self) -> int:
        """A power of two that gives `STEPS` steps, 2 to 64, made a multiple of the ranks."""
        rows = 50_000.0 if self.rows is None else min(self.rows, self.max_conversations or math.inf)
        size = min(64, 2 ** math.floor(math.log2(max(rows * self.epochs / STEPS, 2))))
        ranks = max(self.gpus, 1)
        return max(ranks, size // ranks * ranks)

    @property
    def learning_rate(self) -> float:
        """Narrow models take more: between 1e-4 at a width of 4,096 and the 2e-3 that was chosen at 576, at most 5e-3."""
        return float(f"{min(5e-3, 1e-4 * max(1.0, 4096 / self.shape.hidden_size) ** 1.5):.1g}")


def render_entry(new: NewTarget) -> str:
    """Return the text of `registry/targets/NAME.yaml`: only what is not a default, each line with its reason."""
    return "\n".join(_list_lines(new)) + "\n"


def _list_lines(new: NewTarget) -> Iterator[str]:
    named = {"model": new.model, "revision": new.revision, "dataset": new.dataset}
    known = {name: value for name, value in named.items() if value is not None}
    yield yaml.safe_dump(known, sort_keys=False, width=math.inf, allow_unicode=True).rstrip()
    if new.max_conversations is not None:
        yield f"data: {{max_conversations: {new.max_conversations}}}  # what the hours allow; more data is what helps most"
    if not new.gpus:
        yield "responses: {max_new_tokens: 128}  # the target's answers are most of the work on a processor"
    capture = {"processes": new.gpus} if new.gpus > 1 else {} if new.gpus else {"device": "cpu"}
    if capture:
        yield f"capture: {_flow(capture)}"
    if new.serve:
        yield f"evaluation: {{serving: {{prompts: 8, engines: [{', '.join(new.serve)}]}}}}  # counted in a live server"
    yield "strategies:"
    for name in new.strategies:
        yield from _list_strategy(name, new)


def _list_strategy(name: str, new: NewTarget) -> Iterator[str]:
    yield f"  {name}:"
    options = dict(_choose_options(name, new))
    if options:
        yield f"    options: {_flow(options)}"
    yield "    training:"
    yield f"      global_batch_size: {new.global_batch_size}  # so that few rows make enough steps"
    yield f"      epochs: {new.epochs}"
    yield f"      lr: {new.learning_rate:.1e}  # for a width of {new.shape.hidden_size:,}"
    if new.gpus > 1:
        yield f"      processes: {new.gpus}"
    if not new.gpus:
        yield "      device: cpu"
        if resolve_strategy(name).packing_refusal(resolve_strategy(name).options(**options)) is None:
            yield "      pack_tokens: 2048  # no padding is computed"
            yield "      pack_overlong: own_row"
        yield "      micro_batch_size: 2"


def _choose_options(name: str, new: NewTarget) -> Iterator[tuple[str, Any]]:
    """Yield options that should not be the default for such a model."""
    known = resolve_strategy(name).options.model_fields
    vocabulary = new.shape.vocab_size
    if (
        "draft_vocab_size" in known
        and vocabulary is not None
        and SMALL_DRAFT_VOCABULARY < vocabulary <= LARGE_VOCABULARY
    ):
        yield "draft_vocab_size", SMALL_DRAFT_VOCABULARY
    if "ttt_length" in known and not new.gpus:
        yield "ttt_length", 4
    if "short_unroll" in known and not new.gpus:
        yield "short_unroll", 0.5


def render_dataset(files: Sequence[str]) -> str:
    """Return the text of `registry/datasets/NAME.yaml`."""
    return yaml.safe_dump({"files": list(files)}, width=math.inf, allow_unicode=True)


def _flow(values: dict[str, Any]) -> str:
    return f"{{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"
