"""Dequantises a GGUF file into a folder with the files of a Hugging Face model: safetensors in float32, configs, tokenizer.

    python -m draftworks.programs.convert FILE.gguf FOLDER

The folder appears complete or not at all. One tensor at a time is unpacked, and at most `SHARD_BYTES` are held. Float32
keeps what the blocks say: an offset and a scale in half precision times a few bits need more than bfloat16 has.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from draftworks.distributed.stop_signals import raise_on_stop
from draftworks.errors import ConfigError, DraftworksError
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.files import explain_full_disk, publish_folder
from draftworks.targets.gguf_header import GgufHeader, read_gguf_header
from draftworks.targets.gguf_model import WEIGHT_BYTES, GgufModel, StoredTensor, count_bytes, describe_model
from draftworks.targets.gguf_store import USER_ERROR
from draftworks.targets.gguf_tokenizer import require_tokenizer, write_generation_config, write_tokenizer
from draftworks.targets.safetensors_headers import INDEX, WEIGHTS

SHARD_BYTES = 4_000_000_000
_SECONDS_BETWEEN_LINES = 5.0

Say = Callable[[str], None]


def convert(path: Path, folder: Path, say: Say, shard_bytes: int = SHARD_BYTES) -> None:
    """Dequantise a GGUF file into a new folder, unless another process does so meanwhile.

    A vocabulary that is not known is left out: the target then names a tokenizer.

    Raises:
        ConfigError: its architecture or the kind of a tensor is not read.
        StoreError: the file is damaged.
    """
    header = read_gguf_header(path)
    model = describe_model(header)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder.with_name(f"{folder.name}.lock"), f"{path}: another process dequantises it"):
        if folder.is_dir():
            return
        say(f"dequantising {path.name}: {len(model.tensors)} tensors, {count_bytes(model) / 1e9:.2f} GB in {folder}")
        with publish_folder(folder) as staging:
            _write_json(staging / "config.json", {k: v for k, v in model.config.items() if v is not None})
            write_generation_config(header, staging)
            if _has_known_tokenizer(header):
                write_tokenizer(header, staging)
            _write_weights(path, model, staging, say, shard_bytes)
    say(f"dequantised {path.name}")


def _has_known_tokenizer(header: GgufHeader) -> bool:
    try:
        require_tokenizer(header)
    except ConfigError:
        return False
    return True


def _write_weights(path: Path, model: GgufModel, folder: Path, say: Say, shard_bytes: int) -> None:
    from safetensors.numpy import save_file

    shards = _plan_shards(model.tensors, shard_bytes)
    names = (
        [WEIGHTS] if len(shards) == 1 else [_name_shard(number, len(shards)) for number in range(1, len(shards) + 1)]
    )
    content = np.memmap(path, dtype=np.uint8, mode="r")
    done, total, said, index = 0, count_bytes(model), time.monotonic(), dict[str, str]()
    for file, shard in zip(names, shards):
        arrays: dict[str, np.ndarray] = {}
        for stored in shard:
            arrays |= _unpack(content, stored)
            done += WEIGHT_BYTES * math.prod(stored.source.shape)
            if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                say(f"{done / 1e9:.2f} of {total / 1e9:.2f} GB")
        save_file(arrays, folder / file, metadata={"format": "pt"})
        shutil.copymode(
            folder / "config.json", folder / file
        )  # which others of a team may read; safetensors' only its owner
        index |= dict.fromkeys(arrays, file)
    if len(names) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _plan_shards(tensors: Sequence[StoredTensor], shard_bytes: int) -> list[list[StoredTensor]]:
    """Return the tensors in the files that they go into, each of at most `shard_bytes` or of one tensor."""
    shards: list[list[StoredTensor]] = [[]]
    left = shard_bytes
    for each in tensors:
        nbytes = WEIGHT_BYTES * math.prod(each.source.shape)
        if nbytes > left and shards[-1]:
            shards.append([])
            left = shard_bytes
        shards[-1].append(each)
        left -= nbytes
    return shards


def _name_shard(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def _unpack(content: np.ndarray, stored: StoredTensor) -> dict[str, np.ndarray]:
    """Return a tensor in float32 under the names that transformers has for it."""
    from gguf import GGMLQuantizationType, dequantize

    source = stored.source
    packed = content[source.start : source.start + source.nbytes].reshape(*source.shape[:-1], -1)
    plain = dequantize(packed, GGMLQuantizationType(source.kind)).reshape(source.shape)
    if stored.heads:
        plain = _restore_rope_order(plain, stored.heads)
    parts = [plain] if len(stored.names) == 1 else list(plain)
    return {name: np.array(part, dtype=np.float32, order="C") for name, part in zip(stored.names, parts)}


def _restore_rope_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys in transformers' order.

    llama.cpp turns neighbours 2i and 2i + 1, transformers i and i + half; its converter interleaves the halves (`permute` of
    LlamaModel in convert_hf_to_gguf.py).
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="the new folder")
    wanted = parser.parse_args(arguments)
    raise_on_stop()
    try:
        convert(wanted.file, wanted.folder, lambda line: print(line, flush=True))
    except (DraftworksError, OSError) as error:
        told = explain_full_disk(error, wanted.folder.parent) or error
        print(f"error: {told}", flush=True)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
