"""Gates over an exported folder: one check for each kind of error that the loaders of servers do not report.

Loaders initialise missing tensors, skip unknown ones and misread ids without an error. So the files are read back and
compared with the canonical draft before they are handed out; and our drafter with an independent reader, which shares no
code with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftworks.config.strategies import load_dotted, resolve_export
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.export.canonical import CanonicalDraft, round_target
from draftworks.export.conventions import PROVENANCE, READABLE
from draftworks.export.export_format import DraftShape, ExportFormat
from draftworks.export.readers.gguf_file import DRAFT_FILE, read_gguf_folder
from draftworks.export.readers.reader import ExportFolder, ExportReader, TargetTensors
from draftworks.storage.files import describe_changes
from draftworks.storage.identity import LayerTap
from draftworks.storage.words import list_names

LAYER_CONFIG = "transformer_layer_config"
"""Key of the draft's layer configuration in speculators' format."""
ELSEWHERE = {"sglang": "not run: make test-sglang", "speculators": "not run: make test-speculators"}
"""Libraries whose classes need an environment of their own, with the text that is reported for them."""


def build_server_configs(config: Mapping[str, Any]) -> dict[str, str]:
    """Return, by library, the classes that accept this config.json, or that the library was not run.

    Every server reads drafts with transformers' classes or with classes derived from them.

    Raises:
        ConfigError: a class refuses the configuration, or there is none for its model_type.
    """
    parts = {"config.json": config, LAYER_CONFIG: config.get(LAYER_CONFIG)}
    built = [_build_config(where, part) for where, part in parts.items() if part and "model_type" in part]
    accepted = (
        f"{', '.join(built)} of {version('transformers')}" if built else "not run: config.json names no model_type"
    )
    return {"transformers": accepted, **ELSEWHERE}


def _build_config(where: str, part: Mapping[str, Any]) -> str:
    from transformers import AutoConfig

    heads, kv_heads = part.get("num_attention_heads"), part.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}: no server can group them"
        )
    try:
        return type(AutoConfig.for_model(**part)).__name__
    except Exception as error:  # every class has its own ways to refuse
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"{where}: transformers cannot build a configuration of model_type {part['model_type']!r} from it: {reason}"
        ) from error


LOGITS_TOLERANCE = 1e-5
"""Largest difference of log probabilities, both computed in fp32, in shares of their range."""


@dataclass(frozen=True)
class GateResult:
    """The outcome of one gate; `figures` are JSON-able."""

    name: str = field(default="", kw_only=True)
    passed: bool
    description: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportedDraft:
    """An exported folder beside the draft that it was made from. Properties raise if the files cannot be read as a draft.

    Attributes:
        strategy: built from the canonical draft with weights rounded to `dtype`.
    """

    folder: Path
    export_format: ExportFormat
    draft: CanonicalDraft
    strategy: DraftStrategy
    dtype: torch.dtype
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def shape(self) -> DraftShape:
        """The shape that its config.json describes."""
        return self.export_format.read_shape(self.config, self.draft.target)

    @property
    def expected_shape(self) -> DraftShape:
        """The shape that it must describe."""
        return self.export_format.derive_shape(self.draft)

    def require_tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise StoreError(f"tensor {name} is missing")
        return self.tensors[name]


def check_export(
    folder: Path, export_format: ExportFormat, draft: CanonicalDraft, strategy: DraftStrategy, dtype: torch.dtype
) -> tuple[GateResult, ...]:
    """Run all gates over an exported folder, in order. A bad export fails gates and never raises.

    Args:
        strategy: `draft.build_strategy(dtype)`.
    """
    try:
        found = export_format.read_files(folder)
    except DraftworksError as error:
        return (GateResult(False, str(error), name=READABLE),)
    export = ExportedDraft(folder, export_format, draft, strategy, dtype, found.config, found.tensors)
    read = f"{len(found.tensors)} tensors and config.json"
    readable = GateResult(True, read, {"bytes": found.nbytes}, name=READABLE)
    return (readable, *(run_gate(name, export) for name in GATES))


def run_gate(name: str, export: ExportedDraft) -> GateResult:
    """Run one of `GATES`. An exception that a bad export causes is a failure of the gate."""
    try:
        return replace(GATES[name](export), name=name)
    except (DraftworksError, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        text = str(error) if isinstance(error, DraftworksError) else f"{type(error).__name__}: {error}"
        return GateResult(False, text, name=name)


def _check_key_set(export: ExportedDraft) -> GateResult:
    """Compare with the draft's own shape; whether config.json describes it is another gate's matter."""
    expected = export.export_format.list_expected_tensors(export.expected_shape)
    missing, extra = sorted(expected.keys() - export.tensors.keys()), sorted(export.tensors.keys() - expected.keys())
    if missing or extra:
        return GateResult(False, f"missing: {list_names(missing)}; unknown to the loader: {list_names(extra)}")
    return GateResult(True, f"exactly the {len(expected)} tensors that the loader takes", {"tensors": len(expected)})


def _check_shapes(export: ExportedDraft) -> GateResult:
    expected = export.export_format.list_expected_tensors(export.expected_shape)
    wrong = [
        f"{name}: expected {expected[name]}, found {tuple(tensor.shape)}"
        for name, tensor in export.tensors.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    return GateResult(not wrong, "; ".join(wrong) or "follow from the draft's sizes")


def _check_tensors_equal(export: ExportedDraft) -> GateResult:
    """Compare all tensors with the draft's own, bit for bit and by dtype."""
    expected = export.export_format.build_tensors(export.draft)
    wrong = [
        name
        for name, tensor in expected.items()
        if name not in export.tensors
        or not _equal_bits(export.export_format.hold(tensor, export.dtype), export.tensors[name])
    ]
    if wrong:
        return GateResult(False, f"not the draft's own after re-reading: {list_names(wrong)}")
    return GateResult(True, f"{len(expected)} tensors are the draft's own in {export.dtype}, bit for bit")


def _check_finite(export: ExportedDraft) -> GateResult:
    wrong = [name for name, tensor in export.tensors.items() if not bool(torch.isfinite(tensor).all())]
    if wrong:
        return GateResult(False, f"not finite: {list_names(wrong)}")
    largest = max(
        (float(t.abs().max()) for t in export.tensors.values() if t.is_floating_point() and t.numel()), default=0
    )
    return GateResult(True, "all numbers are finite", {"largest": largest})


def _check_vocabulary(export: ExportedDraft) -> GateResult:
    shape = export.expected_shape
    if "d2t" not in export.export_format.list_expected_tensors(shape):
        return GateResult(True, "the target's full vocabulary: no mapping")
    problem = export.export_format.find_vocabulary_problem(export.tensors, shape.vocab_size)
    if problem:
        return GateResult(False, problem)
    return GateResult(
        True, "d2t holds offsets that lead to the tokens of t2d", {"draft_tokens": export.require_tensor("d2t").numel()}
    )


def _check_fc_width(export: ExportedDraft) -> GateResult:
    if "fc.weight" not in export.export_format.list_expected_tensors(export.expected_shape):
        return GateResult(True, "a format without `fc`: nothing to fuse")
    taps, hidden = len(export.shape.taps), export.shape.hidden_size
    width = export.require_tensor("fc.weight").shape[-1]
    figures = {"taps": taps, "hidden_size": hidden, "fc_inputs": width}
    return GateResult(width == taps * hidden, f"fc reads {width} columns; {taps} layers of {hidden}", figures)


def _check_layer_ids(export: ExportedDraft) -> GateResult:
    found, expected = ([tap.hf_index for tap in taps] for taps in (export.shape.taps, export.draft.taps))
    figures = {"hf_indices": found}
    if found == expected:
        return GateResult(True, f"name the streams that the draft was trained on, {found} as hf_index", figures)
    return GateResult(False, f"name the streams {found} as hf_index, the draft was trained on {expected}", figures)


def _check_config(export: ExportedDraft) -> GateResult:
    """Compare what the format reads in config.json, and every key: some choose a class or a mode of servers only."""
    written = json.loads(json.dumps(export.export_format.build_config(export.draft, export.dtype)))
    found = {key: value for key, value in export.config.items() if key != PROVENANCE}
    wrong = export.expected_shape.describe_differences(export.shape) or describe_changes(written, found)
    return GateResult(not wrong, "; ".join(wrong) or "config.json describes the draft: sizes, norms, rope and options")


def _check_server_config(export: ExportedDraft) -> GateResult:
    built = build_server_configs(export.config)
    return GateResult(True, "; ".join(f"{library}: {text}" for library, text in built.items()), built)


def _check_same_logits(export: ExportedDraft) -> GateResult:
    found = compare_with_reader(export.folder, export.export_format.name, export.draft, export.strategy, export.dtype)
    description = (
        f"an independent reader of the files and the draft differ by {found.largest:.1e} at most in {found.compared:,} "
        f"log probabilities, {found.relative:.1e} of their range (allowed {LOGITS_TOLERANCE:g})"
    )
    figures = {"compared": found.compared, "contexts": list(found.contexts)}
    if math.isfinite(found.largest):  # JSON has no other numbers
        figures |= {"largest_difference": found.largest, "relative_difference": found.relative}
    return GateResult(found.relative <= LOGITS_TOLERANCE, description, figures)


GATES: dict[str, Callable[[ExportedDraft], GateResult]] = {
    "key_set": _check_key_set,
    "shapes": _check_shapes,
    "tensors_equal": _check_tensors_equal,
    "finite": _check_finite,
    "vocabulary": _check_vocabulary,
    "fc_width": _check_fc_width,
    "layer_ids": _check_layer_ids,
    "config_round_trip": _check_config,
    "server_config": _check_server_config,
    "same_logits": _check_same_logits,
}
"""After `readable`; see `GATE_MEANINGS`."""


def _equal_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether both are the same bits. NaN in the same place is the same: `finite` is another gate."""
    return (
        ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(_view_bits(ours), _view_bits(theirs))
    )


def _view_bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def open_export(
    export_format: str, folder: Path, target: TargetTensors, dtype: torch.dtype = torch.float64
) -> ExportReader:
    """Open an exported draft with the independent reader of its format.

    Args:
        dtype: what to compute in, whatever the file holds.

    Raises:
        ConfigError: no such format.
        StoreError: a file is missing or unreadable, or lacks a value that the computation needs.
    """
    read = load_dotted(resolve_export(export_format).reader)
    found = read_gguf_folder(folder) if (folder / DRAFT_FILE).exists() else ExportFolder.read(folder)
    return read(found, target, dtype)


CONTEXTS = (1, 2, 7, 24)
"""Lengths of the random sequences."""
_LEAST = 1e-30
"""Probabilities are clamped to this: below, fp32 may round them to 0."""


@dataclass(frozen=True)
class LogitsComparison:
    """Differences between drafter and reader over `compared` log probabilities.

    Attributes:
        largest: the largest difference.
        relative: the same, divided by the range of the log probabilities of its step, as rounding errors grow with it.
    """

    largest: float
    relative: float
    compared: int
    contexts: tuple[int, ...] = CONTEXTS


def compare_with_reader(
    folder: Path, export_format: str, draft: CanonicalDraft, strategy: DraftStrategy, dtype: torch.dtype
) -> LogitsComparison:
    """Compare both on the same proposals after fixed random features of several lengths.

    The target's embedding and head are rounded to the export's dtype too, as they are in a server of that dtype.

    Args:
        strategy: the draft with weights rounded to `dtype`, computing in fp32.

    Raises:
        StoreError: as `open_export`.
    """
    parts = round_target(draft.parts, dtype)
    target = TargetTensors(parts.embedding, parts.head, parts.embedding_scale)
    reader = open_export(export_format, folder, target, torch.float32)
    pairs = [_ask_both(reader, strategy, length, draft) for length in CONTEXTS]
    gaps = torch.cat([(pair.ours - pair.theirs).abs().amax(-1) for pair in pairs])
    ranges = torch.cat([pair.ours.amax(-1) - pair.ours.amin(-1) for pair in pairs])
    relative = gaps / ranges.clamp_min(1)
    return LogitsComparison(float(gaps.max()), float(relative.max()), sum(pair.ours.numel() for pair in pairs))


class _Answers(NamedTuple):
    """Log probabilities (k, V) of one proposal, by our drafter and by the reader."""

    ours: Tensor
    theirs: Tensor


def _ask_both(reader: ExportReader, strategy: DraftStrategy, length: int, draft: CanonicalDraft) -> _Answers:
    generator = torch.Generator().manual_seed(length)
    width, vocab = draft.parts.hidden_size, draft.parts.vocab_size
    # Features of every layer, and the last states, so that a file with wrong layer ids gets the streams that a server would give it.
    layers = [LayerTap(layer).name for layer in range(draft.parts.num_layers)]
    features = {name: torch.randn(length, width, generator=generator) for name in layers}
    tokens = torch.randint(vocab, (length,), generator=generator)
    features["last"] = torch.randn(length, width, generator=generator)
    drafter = strategy.drafter()
    drafter.extend(features, tokens)
    proposal = drafter.propose(strategy.draft_tokens, temperature=1.0, generator=generator)
    theirs = reader.log_probabilities(features, tokens, proposal.tokens).exp()
    ours = proposal.probabilities
    assert ours is not None, "a proposal at temperature 1 has probabilities"
    return _Answers(ours.clamp_min(_LEAST).log(), theirs.clamp_min(_LEAST).log())
