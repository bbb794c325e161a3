"""The DSpark chain from the weights of an exported draft: the rows of a DFlash block, then one token after the other.

DSpark from exported files: z-lab's layout of DFlash with the heads as SGLang 0.5.23 reads them, and that of speculators.

SGLang asks for the keys of the heads in `dflash_config` or beside it when it checks them, and beside it alone when it builds
the heads. It leaves a Markov head whose tensors are missing as the memory had it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from draftworks.export.readers.files import DraftVocabulary, Expected, ExportFolder
from draftworks.export.readers.reader import ExportReader, Features, TargetTensors
from draftworks.storage.identity import LayerTap
from draftworks.strategies.dflash.reader import SPECULATORS, ZLAB, DFlashReader, read_speculators, read_zlab


class _Place(NamedTuple):
    """Of a proposal: its row of the block (H,), and what the Markov head embeds the token before it to (r,)."""

    row: Tensor
    before: Tensor


@dataclass(frozen=True)
class DSparkReader(ExportReader):
    """Proposal i is said by row i of the block, the anchor's own row first. To its logits comes what the Markov head makes of
    the token before it: the anchor, then the proposals.
    """

    taps: tuple[LayerTap, ...]
    vocabulary: DraftVocabulary
    dtype: torch.dtype
    backbone: DFlashReader = field(repr=False)
    markov: str | None
    """Kind of the Markov head; None where there is none."""
    confidence_with_markov: bool

    @torch.no_grad()
    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        places = list(self._places(features, next_tokens, drawn))
        base = torch.stack([place.row for place in places]) @ self.backbone.head.T
        if self.markov is None:
            return base
        narrow = self._recurrent(places) if self.markov == "rnn" else [self._memoryless(place) for place in places]
        return base + torch.stack(narrow) @ self._weight("markov_head.markov_w2.weight").T

    @torch.no_grad()
    def confidence(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        """Logits (k,) of each proposal being accepted, of a draft that has such a head. Arguments as for `logits`."""
        weight, bias = (self._weight(f"confidence_head.proj.{part}") for part in ("weight", "bias"))
        read = [
            torch.cat([place.row, place.before]) if self.confidence_with_markov else place.row
            for place in self._places(features, next_tokens, drawn)
        ]
        return torch.stack(read) @ weight[0] + bias

    def _places(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Iterator[_Place]:
        rows = self.backbone.rows(features, next_tokens)
        if len(drawn) > len(rows):
            raise ValueError(f"a block has {len(rows)} proposals, asked for {len(drawn)}")
        before = [int(next_tokens[-1]), *drawn[:-1].tolist()]
        for row, token in zip(rows, before):
            yield _Place(row, row[:0] if self.markov is None else self._weight("markov_head.markov_w1.weight")[token])

    def _memoryless(self, place: _Place) -> Tensor:
        if self.markov == "vanilla":
            return place.before
        return self._affine("gate_proj", place.row, place.before).sigmoid() * place.before

    def _recurrent(self, places: list[_Place]) -> list[Tensor]:
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


_RANK, _KIND = "markov_rank", "markov_head_type"
_CONFIDENCE, _WITH_MARKOV = "enable_confidence_head", "confidence_head_with_markov"
_KINDS = ("vanilla", "gated", "rnn")


def read_zlab_dspark(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DSparkReader:
    """A draft as SGLang loads it.

    Raises:
        StoreError: files that it would refuse, or load as another draft than the one that was trained.
    """
    for key in (_RANK, _KIND, _CONFIDENCE, _WITH_MARKOV):
        folder.must_not_differ(f"dflash_config.{key}", folder.setting(key, (int, str, bool)))
    folder.must_not_differ("sample_from_anchor", True)
    if folder.setting(_RANK, int) == 0:
        folder.refuse(_RANK, "1 or more, without which SGLang takes no draft", "0")
    layout = replace(ZLAB, export_format="zlab_dspark", class_name="DSparkDraftModel")
    vocab = folder.setting("vocab_size", int)
    heads = _heads(folder, folder.setting("hidden_size", int), vocab, says=vocab)
    return _reader(folder, read_zlab(folder, target, dtype, layout, heads))


def read_speculators_dspark(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DSparkReader:
    """A draft as speculators 0.9.0 and vLLM load it.

    Raises:
        StoreError: files that one of the two would load as another draft than the one that was trained.
    """
    layout = replace(SPECULATORS, export_format="speculators_dspark", algorithm="dspark", from_anchor=True)
    section = layout.section
    hidden, vocab = (folder.setting(f"{section}{key}", int) for key in ("hidden_size", "vocab_size"))
    heads = _heads(folder, hidden, vocab, says=folder.setting("draft_vocab_size", int))
    return _reader(folder, read_speculators(folder, target, dtype, layout, heads))


def _reader(folder: ExportFolder, backbone: DFlashReader) -> DSparkReader:
    return DSparkReader(
        taps=backbone.taps,
        vocabulary=backbone.vocabulary,
        dtype=backbone.dtype,
        backbone=backbone,
        markov=folder.setting(_KIND, str) if folder.setting(_RANK, int) else None,
        confidence_with_markov=folder.setting(_WITH_MARKOV, bool),
    )


def _heads(folder: ExportFolder, hidden: int, vocab: int, says: int) -> dict[str, Expected]:
    """What the file must hold beside the backbone. `says`: tokens of the draft's vocabulary."""
    rank, kind = folder.setting(_RANK, int), folder.setting(_KIND, str)
    if kind not in _KINDS:
        folder.refuse(_KIND, f"one of {', '.join(_KINDS)}", kind)
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (says, rank)}
    if rank and kind == "gated":
        shapes |= _affine("markov_head.gate_proj", rank, hidden + rank)
    if rank and kind == "rnn":
        shapes |= _affine("markov_head.joint_proj", 3 * rank, 2 * rank + hidden)
    if folder.setting(_CONFIDENCE, bool):
        if folder.setting(_WITH_MARKOV, bool) and not rank:
            folder.refuse(_WITH_MARKOV, "false where markov_rank is 0", "true")
        shapes |= _affine("confidence_head.proj", 1, hidden + (rank if folder.setting(_WITH_MARKOV, bool) else 0))
    return {name: Expected(shape) for name, shape in shapes.items()}


def _affine(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
