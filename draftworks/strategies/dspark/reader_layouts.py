"""DSpark from exported files: z-lab's layout of DFlash with the heads as SGLang 0.5.23 reads them, and that of speculators.

SGLang asks for the keys of the heads in `dflash_config` or beside it when it checks them, and beside it alone when it builds
the heads. It leaves a Markov head whose tensors are missing as the memory had it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from draftworks.export.readers.files import Expected, ExportFolder
from draftworks.export.readers.reader import TargetTensors
from draftworks.strategies.dflash.reader import DFlashReader
from draftworks.strategies.dflash.reader_layouts import SPECULATORS, ZLAB, read_speculators, read_zlab
from draftworks.strategies.dspark.reader import DSparkReader

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
