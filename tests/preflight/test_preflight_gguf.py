"""`check` of a target whose model is a GGUF file: it is dequantised once, and judged as any other model."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import GgufFile


def write(fleet, file: GgufFile, **entry: object) -> Path:
    path = file.write(fleet.root / "registry" / "model.gguf")
    fleet.write(model="model.gguf", **entry)
    return path


def test_a_sound_file_has_no_problem_and_is_dequantised_once(fleet, monkeypatch: pytest.MonkeyPatch):
    write(fleet, GgufFile("llama", packing="Q8_0"))
    assert fleet.check().errors == []
    monkeypatch.setattr("draftworks.targets.gguf_store._run_program", None)
    assert fleet.check().errors == []


def test_what_the_file_does_not_say_is_asked_for(fleet):
    write(fleet, GgufFile("llama", metadata={"tokenizer.chat_template": None}))
    (error,) = set(fleet.check().errors)
    assert "has no chat template: set `chat_template` of the target to a Jinja file" in error


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            GgufFile("llama", metadata={"general.architecture": "mamba"}),
            "architecture 'mamba' is not read from GGUF files",
        ),
        (GgufFile("llama", pre="kimi-k2"), "tokenizer.ggml.pre 'kimi-k2' is not known here"),
    ],
)
def test_a_file_that_is_not_read_is_one_error(fleet, file: GgufFile, message: str):
    write(fleet, file)
    (error,) = fleet.check().errors
    assert message in error


def test_a_file_that_is_cut_is_one_error(fleet):
    path = write(fleet, GgufFile("llama"))
    path.write_bytes(path.read_bytes()[:-100])
    (error,) = fleet.check().errors
    assert "it is cut. Copy or download it again" in error
