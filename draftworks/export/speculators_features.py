"""Features in the layout of speculators 0.9.0: a data set that `speculators train` reads in place of running a target.

    out/state.json, dataset_info.json, data-….arrow    a data set of the library `datasets`: input_ids, loss_mask, seq_len
    out/hidden_states/hs_{row}.safetensors             hidden_states [T, n + 1, H] bfloat16, token_ids [T] int64
    out/draftworks.json                                where it comes from, and the layer ids as that library counts them

With fp8, as its `fp8` transfer reads: `hidden_states` float8_e4m3fn, and `hidden_states_scales` [T, 1, 1] float32, one
scale for all streams of a token.

The library has `last` before the target's final norm and applies that norm itself. Where `last` was captured after it, it
is divided by the norm's weight: an RMS norm of the quotient gives `last` again, as it drops the scale that is not known.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftworks.data.tokenized import TokenizedSet, TokenRow
from draftworks.errors import DataError, StoreError
from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.features.manifest import FeatureSetManifest
from draftworks.features.tensor_bytes import decode_features
from draftworks.features.wrapped_store import JoinedStore
from draftworks.storage.files import publish_folder
from draftworks.storage.identity import LayerTap

HIDDEN_STATES = "hidden_states"
SCALES = "hidden_states_scales"
RECORD = "draftworks.json"
_ARROW = "data-00000-of-00001.arrow"
_LARGEST = 448.0
_NORM_TOLERANCE = 0.05
"""Most that the root mean square of `last` over the norm's weight may be off 1, as a share; bfloat16 is off by 0.01."""


@dataclass(frozen=True)
class SpeculatorsFeatures:
    """What is written.

    Attributes:
        taps: names of the streams beside `last`, in the order in which the draft reads them.
        final_norm: weight (H,) of the target's final norm, by which `last` is divided; None: `last` is as captured, before
            that norm.
        fp8: write float8_e4m3fn with scales.
        limit: number of samples, the first of the set; None for all.
    """

    taps: tuple[str, ...]
    final_norm: Tensor | None
    fp8: bool = False
    limit: int | None = None

    @property
    def layer_ids(self) -> list[int]:
        """Ids of the taps as speculators and vLLM count layers."""
        return [LayerTap(int(name.removeprefix("hf"))).to_vllm() for name in self.taps]


def export_features(
    manifest: FeatureSetManifest,
    store: KeyedFeatureStore,
    tokens: TokenizedSet,
    wanted: SpeculatorsFeatures,
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write the samples of a feature set into the new folder `out`, which is complete or absent; return its record.

    Args:
        progress: called after each sample with the number of samples written, and of all.

    Raises:
        StoreError: `out` exists, its disk is too small, the set lacks a stream, or a feature is missing or damaged.
        DataError: `last` is not what the target's final norm gives, so that its input cannot be found.
    """
    if out.exists():
        raise StoreError(f"{out}: expected a folder that does not exist yet. Remove it, or name another one")
    names = (*wanted.taps, "last")
    missing = [name for name in names if name not in manifest.streams]
    if missing:
        raise StoreError(f"the feature set lacks the streams {missing}, it has {list(manifest.streams)}: capture them")
    refs = [ref.select(names) for ref in manifest.refs[: wanted.limit]]
    _require_room(out, refs, wanted)
    joined = JoinedStore(store, tokens)
    with publish_folder(out) as folder, closing(store):
        (folder / HIDDEN_STATES).mkdir()
        for row, ref in enumerate(refs):
            _write_sample(folder / HIDDEN_STATES / f"hs_{row}.safetensors", joined, ref, wanted)
            progress(row + 1, len(refs))
        _write_dataset(folder, [tokens.by_id(ref.sample_id) for ref in refs])
        record = {
            "written_for": "speculators 0.9.0",
            "target": manifest.identity.target,
            "data_version": manifest.data_version,
            "samples": len(refs),
            "tokens": sum(ref.num_tokens for ref in refs),
            "streams": list(names),
            "target_layer_ids": wanted.layer_ids,
            "transfer": "fp8" if wanted.fp8 else "file",
            "last": "before the final norm, each token to a factor" if wanted.final_norm is not None else "as captured",
        }
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return record


def undo_final_norm(last: Tensor, weight: Tensor, where: str) -> Tensor:
    """Return states (S, H) whose RMS norm with `weight` (H,) is `last`, in float32; each token's own scale is lost.

    Raises:
        DataError: `last` is not the result of such a norm.
    """
    weight = weight.float()
    lost = weight == 0  # channels that the norm drops
    states = (last.float() / weight.masked_fill(lost, 1.0)).masked_fill(lost, 0.0)  # (S, H)
    if bool(lost.any()):
        # The mean square before the weight is 1: what the known channels lack of that was in the dropped ones.
        rest = (len(weight) - states.square().sum(dim=1, keepdim=True)).clamp(min=0.0)  # (S, 1)
        states = torch.where(lost, (rest / int(lost.sum())).sqrt(), states)
    sizes = states.square().mean(dim=1).sqrt()  # (S,)
    typical = float(sizes.median()) if len(sizes) else 1.0
    if not abs(typical - 1.0) <= _NORM_TOLERANCE:
        raise DataError(
            f"{where}: `last` over the weight of the target's final norm has a root mean square of {typical:.3g}, expected "
            "1: that norm is no RMS norm with this weight, and speculators cannot be given its input. Nothing was written"
        )
    return states


def quantize(streams: Tensor) -> dict[str, Tensor]:
    """Return streams (T, n, H) as `quantize_tensor_to_fp8` of speculators 0.9.0 gives them: values, and scales (T, 1, 1)."""
    whole = streams.float()
    scales = (whole.abs().amax(dim=(1, 2), keepdim=True) / _LARGEST).clamp(min=1e-12)
    return {HIDDEN_STATES: (whole / scales).to(torch.float8_e4m3fn), SCALES: scales}


def _write_sample(path: Path, store: JoinedStore, ref: SampleRef, wanted: SpeculatorsFeatures) -> None:
    from safetensors.torch import save_file

    where = f"sample {ref.sample_id}"
    found, handle = store.get(ref)
    try:
        decoded = decode_features(found, where)
        taps = [decoded[name] for name in wanted.taps]
        last = decoded["last"]
        if wanted.final_norm is not None:
            last = undo_final_norm(last, wanted.final_norm, where)
        if wanted.fp8:
            last = _match_size(last, taps)
        streams = torch.stack([*taps, last.to(torch.bfloat16)], dim=1).to(torch.bfloat16)  # (T, n + 1, H)
        tensors = quantize(streams) if wanted.fp8 else {HIDDEN_STATES: streams}
        save_file({**tensors, "token_ids": decoded["input_ids"].long()}, path)
    finally:
        store.release(handle)


def _match_size(last: Tensor, taps: Sequence[Tensor]) -> Tensor:
    """Return `last` (S, H) times a power of two per token, so that its largest value is about that of the taps.

    All streams of a token share one scale: a stream that is much smaller than another one would lose its digits.
    """
    if not taps:
        return last
    largest = torch.stack([tap.float().abs().amax(dim=1) for tap in taps]).amax(dim=0)  # (S,)
    factor = (largest / last.float().abs().amax(dim=1).clamp(min=1e-12)).clamp(min=1.0)
    return last.float() * torch.exp2(torch.floor(torch.log2(factor)))[:, None]


def _write_dataset(folder: Path, rows: Sequence[TokenRow]) -> None:
    """Write a data set as `Dataset.save_to_disk` of `datasets` does, whose rows are read as torch tensors."""
    import pyarrow as pa

    columns = {
        "input_ids": pa.array([row.input_ids.tolist() for row in rows], pa.list_(pa.int64())),
        "loss_mask": pa.array([row.loss_mask.astype(int).tolist() for row in rows], pa.list_(pa.int64())),
        "seq_len": pa.array([len(row) for row in rows], pa.int64()),
    }
    table = pa.table(columns)
    with pa.OSFile(str(folder / _ARROW), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    number = {"dtype": "int64", "_type": "Value"}
    numbers = {"feature": number, "_type": "List"}
    features = {"input_ids": numbers, "loss_mask": numbers, "seq_len": number}
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state = {
        "_data_files": [{"filename": _ARROW}],
        "_fingerprint": "0" * 16,
        "_format_columns": list(columns),
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    (folder / "state.json").write_text(json.dumps(state))


def _require_room(out: Path, refs: Sequence[SampleRef], wanted: SpeculatorsFeatures) -> None:
    width = refs[0].feature_specs["last"].shape[-1] if refs else 0
    per_token = (len(wanted.taps) + 1) * width * (1 if wanted.fp8 else 2)
    needed = sum(ref.num_tokens for ref in refs) * per_token
    existing = next(folder for folder in out.resolve().parents if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise StoreError(
            f"{out}: the features take {needed / 1e9:.3f} GB, and the disk has {free / 1e9:.3f} GB left. Nothing was "
            "written: use --samples or --fp8, or another disk"
        )
