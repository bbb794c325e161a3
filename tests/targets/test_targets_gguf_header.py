"""What a GGUF file says of itself is read as llama.cpp's own library reads it, and damage is one clear line."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import GgufFile

from draftworks.errors import ConfigError, StoreError
from draftworks.targets.gguf_header import PACKINGS, read_gguf_header
from draftworks.targets.gguf_model import READABLE, describe_model, read_gguf_sizes
from draftworks.targets.gguf_tokenizer import require_tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GgufFile("qwen3", packing="Q8_0").write(tmp_path_factory.mktemp("file") / "model.gguf")


def test_tensors_lie_where_the_library_finds_them(path: Path):
    found = {each.name: each for each in read_gguf_header(path).tensors}
    expected = {each.name: each for each in GGUFReader(path).tensors}
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        ours = found[name]
        assert ours.packing is not None
        assert (ours.start, ours.nbytes, ours.kind) == (each.data_offset, each.n_bytes, each.tensor_type)
        assert ours.shape == tuple(map(int, reversed(each.shape)))


def test_kinds_have_the_librarys_numbers_and_sizes():
    for kind, (elements, nbytes) in GGML_QUANT_SIZES.items():
        packing = PACKINGS.get(int(kind))
        if packing is not None:
            assert (packing.name, packing.elements, packing.nbytes) == (kind.name, elements, nbytes)


def test_every_kind_that_is_taken_can_be_dequantised():
    from gguf import dequantize

    for name in READABLE:
        kind = GGMLQuantizationType[name]
        elements, nbytes = GGML_QUANT_SIZES[kind]
        assert dequantize(np.zeros((2, 4 * nbytes), np.uint8), kind).shape == (2, 4 * elements)


def test_sizes_are_read_without_the_vocabulary(path: Path, monkeypatch: pytest.MonkeyPatch):
    """The code location asks for them at each load of an entry, and a vocabulary is 150,000 texts."""
    monkeypatch.setattr("draftworks.targets.gguf_header._Reader._require_room", refuse_long(100))
    sizes = read_gguf_sizes(path)
    assert (sizes.num_layers, sizes.hidden_size, sizes.vocab_size, sizes.context) == (2, 64, 2048, 128)


def refuse_long(most: int):
    def require(reader: object, count: int, width: int) -> int:
        assert count <= most
        return count

    return require


def test_a_file_that_is_cut_anywhere_is_one_line(path: Path, tmp_path: Path):
    content, cut = path.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 200, 7), *range(200, len(content), len(content) // 40), len(content) - 40]:
        cut.write_bytes(content[:length])
        with pytest.raises(StoreError) as told:
            read_gguf_header(cut)
        assert str(told.value).startswith(f"{cut}: ")
        assert "\n" not in str(told.value)


def test_damaged_bytes_are_read_or_refused_and_nothing_else(path: Path, tmp_path: Path):
    content, damaged, chance = path.read_bytes(), tmp_path / "damaged.gguf", random.Random(0)
    refused = 0
    for _ in range(150):
        changed = bytearray(content)
        for _ in range(3):
            changed[chance.choice((chance.randrange(900), chance.randrange(len(content) // 2)))] = chance.randrange(256)
        damaged.write_bytes(changed)
        try:
            header = read_gguf_header(damaged)
            describe_model(header)
            require_tokenizer(header)
        except (StoreError, ConfigError):
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a GGUF file, found one that begins with b''"),
        (b"PK\x03\x04 a zip", r"begins with b'PK\\x03\\x04'"),
        (b"GGUF\x01\0\0\0" + bytes(16), "it has version 1, expected 2 or 3"),
        (b"GGUF\0\0\0\x03" + bytes(16), "it has version 50331648"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "it counts 18446744073709551615 tensors"),
    ],
)
def test_what_is_no_file_of_this_kind_is_said(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=message):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (GgufFile("llama", metadata={"llama.expert_count": 8}), "an architecture llama with experts is not read"),
        (GgufFile("llama", metadata={"split.count": 3}), "is one of 3 parts: merge them by llama-gguf-split"),
        (GgufFile("llama", metadata={"llama.rope.scaling.type": "yarn"}), "a rope scaled as 'yarn' is not read"),
        (GgufFile("llama", metadata={"llama.rope.dimension_count": 8}), "rope.dimension_count 8: expected all 16"),
        (GgufFile("llama", metadata={"llama.block_count": None}), "llama.block_count: expected one int, found nothing"),
        (
            GgufFile("llama", metadata={"llama.context_length": "long"}),
            "context_length: expected one int, found 'long'",
        ),
        (GgufFile("llama", metadata={"general.architecture": "mamba"}), "architecture 'mamba' is not read from GGUF"),
        (
            GgufFile("llama", tensors={"rope_freqs.weight": np.full(8, 2, np.float32)}),
            "in another way than Llama 3.1's",
        ),
        (
            GgufFile("llama", tensors={"codes": np.ones(4, np.int8)}),
            "1 tensors cannot be dequantised, such as codes of I8",
        ),
    ],
)
def test_what_the_family_of_transformers_does_not_have_is_refused(tmp_path: Path, file: GgufFile, message: str):
    header = read_gguf_header(file.write(tmp_path / "model.gguf"))
    with pytest.raises(ConfigError, match=message) as told:
        describe_model(header)
    assert "\n" not in str(told.value)
