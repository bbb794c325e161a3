"""Real vLLM in the capturing process: its streams and answers are transformers' own, and what is wrong is told in a line."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_toys import capture_run, changed_copy, random_rows
from model_families import save_family
from safetensors.torch import load_file
from torch import Tensor
from vllm_toys import VLLM, make_vllm_environment

from draftworks.capture.engine import load_engine
from draftworks.capture.probe.probe import FLOORS
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.tokenized import write_tokens
from draftworks.storage.identity import LayerTap

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DRIVER = Path(__file__).parents[2] / "toys" / "embedded_vllm.py"
TAPS = [0, 2, 5]
ROWS = [[(31 * index + 7) % 1990 + 5 for index in range(length)] for length in (9, 150, 1)]
"""The second is read in chunks of 64 tokens."""


@dataclass(frozen=True)
class Asked:
    """What the driver wrote: captured streams by name, and what it was told."""

    target: TargetFiles
    out: Path
    told: dict[str, Any]

    def read(self, name: str) -> dict[str, Tensor]:
        return load_file(self.out / f"{name}.safetensors")


def ask(target: TargetFiles, folder: Path, also: list[str]) -> Asked:
    """Run the driver with vLLM's Python."""
    run = capture_run(target, folder, backend="vllm").model_copy(update={"taps": TAPS})
    write_tokens(run.tokens, random_rows(4, seed=3, longest=60))
    out = folder / "told"
    out.mkdir()
    foreign = changed_copy(target, folder / "foreign", 0.5).model if "wrong" in also else ""
    told = {
        "run": run.model_dump(mode="json"),
        "folder": str(folder),
        "out": str(out),
        "also": also,
        "foreign": foreign,
    }
    asked = json.dumps({**told, "taps": TAPS, "rows": ROWS})
    environment = make_vllm_environment(folder / "package")
    subprocess.run([VLLM.python, str(DRIVER)], input=asked, text=True, check=True, env=environment)
    return Asked(target, out, json.loads((out / "told.json").read_text()))


@pytest.fixture(scope="module")
def llama(tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return ask(tiny_target, tmp_path_factory.mktemp("llama"), ["restart", "wrong"])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = tmp_path_factory.mktemp("qwen3")
    return ask(save_family("qwen3", folder / "model", head_dim=32), folder, [])  # its kernels know no 16


@pytest.fixture(params=["llama", "qwen3"])
def asked(request: pytest.FixtureRequest) -> Asked:
    return request.getfixturevalue(request.param)


def differ(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def test_streams_and_logits_are_those_of_transformers_whole_and_in_chunks(asked: Asked):
    hf = load_engine(asked.target, CaptureSpec(compute_dtype="float32", device="cpu"), torch.device("cpu"))
    expected = hf.capture(ROWS, list(map(LayerTap, TAPS)))
    for number, streams in enumerate(expected):
        found = asked.read(f"together-{number}")
        assert found.keys() == streams.keys()
        for name, stream in streams.items():
            assert differ(found[name], stream) < FLOORS[torch.float32], (number, name)
    logits = torch.stack([each[-1] for each in hf.logits(ROWS)])
    assert differ(asked.read("logits")["logits"], logits) < FLOORS[torch.float32]


def test_the_only_request_of_an_engine_has_all_its_rows(asked: Asked):
    alone, together = asked.read("alone-0"), asked.read("together-0")
    assert all(differ(alone[name], stream) < 1e-5 for name, stream in together.items())


def test_greedy_answers_are_those_of_transformers(asked: Asked):
    hf = load_engine(asked.target, CaptureSpec(compute_dtype="float32", device="cpu"), torch.device("cpu"))
    made = hf.generate(ROWS, ResponseSpec(max_new_tokens=8), ["a", "b", "c"], asked.target.context, end_ids=[2])
    assert asked.told["answers"] == [[*each.ids, int(each.finished)] for each in made]


def test_a_sound_engine_passes_the_probe_and_says_what_it_is(asked: Asked):
    assert asked.told["probe"] == ""
    assert (asked.told["tested"], asked.told["name"]) == (True, "vLLM in this process")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("late", r"stream hf\d differs by .*; it is hf\d"),
        ("foreign", r"stream (hf\d|last) differs by"),
        ("unloaded", "vLLM wrote no hidden states .* expected a file from its connector. Check that it is loaded"),
        ("full", "the engine could not write hidden states: .*"),
        ("closed", "vLLM in this process cannot answer any more: the engine was closed"),
    ],
)
def test_what_is_wrong_is_told(llama: Asked, case: str, message: str):

    assert re.search(message, llama.told[case]), llama.told[case]


def test_an_engine_that_failed_is_started_again_in_the_same_process(llama: Asked):
    assert llama.told["revived"] == ""
