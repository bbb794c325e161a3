"""DSpark from exported files: z-lab's layout of DFlash with the heads as SGLang 0.5.23 reads them, and that of speculators.

SGLang looks for the keys of the heads in `dflash_config` or beside it when it checks them, but beside it alone when it builds
the heads; so does this reader. It leaves a Markov head whose tensors are missing as the memory had it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftworks.export.readers.reader import ExportFolder, Features, TargetTensors
from draftworks.strategies.dflash.reader import DFlashReader, HeadReader, read_speculators, read_zlab


class _Place(NamedTuple):
    """Inputs of the heads for one proposal: its row of the block (H,), and the Markov embedding (r,) of the token before."""

    row: Tensor
    before: Tensor


@dataclass(frozen=True)
class DSparkReader(HeadReader):
    """Proposal i is made by row i of the block, the anchor's own row first. To its logits comes what the Markov head makes
    of the token before it: the anchor, then the proposals.

    Attributes:
        markov: kind of the Markov head (vanilla, gated or rnn); None where there is none.
    """

    markov: str | None
    confidence_with_markov: bool

    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        places = list(self._places(features, next_tokens, drawn))
        base = torch.stack([place.row for place in places]) @ self.backbone.head.T
        if self.markov is None:
            return base
        narrow = self._run_recurrent(places) if self.markov == "rnn" else [self._run_memoryless(p) for p in places]
        return base + torch.stack(narrow) @ self._weight("markov_head.markov_w2.weight").T

    def confidence(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        """Return the logits (k,) of each proposal being accepted, by the confidence head. Arguments as for `logits`."""
        weight, bias = (self._weight(f"confidence_head.proj.{part}") for part in ("weight", "bias"))
        read = [
            torch.cat([place.row, place.before]) if self.confidence_with_markov else place.row
            for place in self._places(features, next_tokens, drawn)
        ]
        return torch.stack(read) @ weight[0] + bias

    def _places(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Iterator[_Place]:
        rows = self.backbone.proposing_rows(features, next_tokens, len(drawn))
        for row, token in zip(rows, [int(next_tokens[-1]), *drawn.tolist()]):
            yield _Place(row, row[:0] if self.markov is None else self._weight("markov_head.markov_w1.weight")[token])

    def _run_memoryless(self, place: _Place) -> Tensor:
        if self.markov == "vanilla":
            return place.before
        return self._affine("gate_proj", place.row, place.before).sigmoid() * place.before

    def _run_recurrent(self, places: list[_Place]) -> list[Tensor]:
        state = torch.zeros_like(places[0].before)
        narrow = []
        for place in places:
            keep, new, out = self._affine("joint_proj", state, place.before, place.row).view(3, -1)
            narrow.append(out.tanh())
            state = new.tanh() + keep.sigmoid() * (state - new.tanh())
        return narrow

    def _affine(self, name: str, *inputs: Tensor) -> Tensor:
        weight, bias = (self._weight(f"markov_head.{name}.{part}") for part in ("weight", "bias"))
        return weight @ torch.cat(inputs) + bias

    def _weight(self, name: str) -> Tensor:
        return self.backbone.weights[name]


def read_zlab_dspark(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DSparkReader:
    """Read a draft as SGLang does, and SpecForge, which has a key for the row that proposes first."""
    first_row = 0 if folder.find_setting("sample_from_anchor", True) else 1
    return _read(folder, read_zlab(folder, target, dtype, "zlab_dspark", first_row))


def read_speculators_dspark(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DSparkReader:
    """Read a draft as speculators 0.9.0 and vLLM do."""
    return _read(folder, read_speculators(folder, target, dtype, "speculators_dspark", from_anchor=True))


def _read(folder: ExportFolder, backbone: DFlashReader) -> DSparkReader:
    return DSparkReader(
        backbone=backbone,
        markov=folder.require_setting("markov_head_type") if folder.require_setting("markov_rank") else None,
        confidence_with_markov=folder.require_setting("confidence_head_with_markov"),
    )
