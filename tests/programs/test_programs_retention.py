"""The commands usage, prune, pin and unpin.
The programs give the same numbers from every kind of store, and capture only what a store lacks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retention_toys import make_features, make_result
from typer.testing import CliRunner

from draftworks.config.registry_files import CaptureSpec, EvaluationSpec, LoopSpec, TrainingSpec
from draftworks.config.run_files import CaptureRun, EvaluateRun, FeatureSet, StoreSpec, TargetFiles, TrainRun
from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.data.vocab import build_vocab_mapping, count_supervised_tokens
from draftworks.programs.capture import capture
from draftworks.programs.cli import app
from draftworks.programs.evaluate import evaluate
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "a.yaml").write_text("model: m\ndataset: d\n")
    (tmp_path / "deployment.yaml").write_text("var: var\nretention: {keep_days: 0}\n")
    return tmp_path


def call(registry: Path, *words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--registry", str(registry)])
    assert done.exit_code == 0, done.output
    return done.output


def test_prune_shows_what_would_go_and_removes_it_only_when_told(registry: Path):
    old = make_result(registry / "var", "x_draft", lr=1)
    new = make_result(registry / "var", "x_draft", lr=2)
    shown = call(registry, "prune")
    assert f"x_draft {old.path.name} of a: nothing in use was made from it" in shown
    assert "Remove with: draftworks prune --yes" in shown
    assert old.path.exists()
    assert "removed 1: " in call(registry, "prune", "--yes")
    assert (old.path.exists(), new.path.exists()) == (False, True)
    assert json.loads(call(registry, "prune", "--json")) == {"would_remove": [], "bytes": 0}


def test_usage_adds_up(registry: Path):
    make_result(registry / "var", "x_draft")
    make_features(registry / "var", [1], "tokens")
    found = json.loads(call(registry, "usage", "--json"))
    assert {(each["kind"], each["owner"]) for each in found["sizes"]} == {
        ("drafts", "a"),
        ("data", "a"),
        ("features", "0123456789abcdef"),
    }
    shown = call(registry, "usage")
    assert "together" in shown
    assert "a (weights 01234567)  features" in shown


def test_a_pinned_result_stays_until_it_is_unpinned(registry: Path):
    old = make_result(registry / "var", "x_draft", lr=1)
    assert "pinned x_draft" in call(registry, "pin", "a", "x_draft", "--why", "for the paper")
    make_result(registry / "var", "x_draft", lr=2)
    assert "for the paper" in call(registry, "usage")
    call(registry, "prune", "--yes")
    assert old.path.exists()
    call(registry, "unpin", "a", "x_draft", old.path.name)
    call(registry, "prune", "--yes")
    assert not old.path.exists()


@pytest.mark.parametrize(
    "words", [("pin", "a", "no_such_asset"), ("pin", "../a", "x"), ("unpin", "a", "x_draft", "0123456789abcdef")]
)
def test_what_is_not_there_is_one_line(registry: Path, words: tuple[str, ...]):
    done = CliRunner().invoke(app, [*words, "--registry", str(registry)])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)


TAPS = [2, 4, 5]
CAPTURE = CaptureSpec(dtype="float32", compute_dtype="float32", device="cpu")
TRAINING = TrainingSpec(global_batch_size=4, micro_batch_size=2, epochs=2, lr=5e-3, compute_dtype="float32")
OPTIONS = {"ttt_length": 2, "draft_vocab_size": 64, "intermediate_size": 32, "layer_ids": TAPS}


@dataclass(frozen=True)
class Chain:
    """Capture, training and evaluation in a folder, over one store."""

    folder: Path
    target: TargetFiles
    store: StoreSpec

    def captured(self, name: str, taps: list[int]) -> dict[str, Any]:
        run = CaptureRun(
            out=self.folder / f"{name}-features", target=self.target, tokens=self.folder / f"{name}-tokens", taps=taps,
            capture=CAPTURE, store=self.store,
        )  # fmt: skip
        return capture(run, ProgramContext())

    def trained(self) -> dict[str, Any]:
        counts = count_supervised_tokens(TokenizedSet.open(self.folder / "train-tokens"), self.target.vocab_size)
        build_vocab_mapping(counts, OPTIONS["draft_vocab_size"]).save(self.folder / "vocab.safetensors")
        run = TrainRun(out=self.folder / "draft", training=TRAINING, train=self._set("train"), **self._common())
        return train(run, ProgramContext())

    def evaluated(self) -> dict[str, Any]:
        run = EvaluateRun(
            out=self.folder / "report", draft=self.folder / "draft", train_tokens=self.folder / "train-tokens",
            device="cpu", evaluation=EvaluationSpec(loop=LoopSpec(prompts=0)), **self._common(),
        )  # fmt: skip
        return evaluate(run, ProgramContext())["drafts"]

    def _common(self) -> dict[str, Any]:
        vocab, heldout = self.folder / "vocab.safetensors", self._set("heldout")
        named = {"strategy": "eagle3", "options": OPTIONS, "target": self.target, "store": self.store}
        return {**named, "heldout": heldout, "vocab_mapping": vocab}

    def _set(self, name: str) -> FeatureSet:
        return FeatureSet(tokens=self.folder / f"{name}-tokens", features=self.folder / f"{name}-features")


def write_sets(folder: Path) -> None:
    generator = np.random.default_rng(0)
    for name, count in (("train", 9), ("heldout", 4)):
        ids = [generator.integers(5, 99, int(generator.integers(6, 15))).astype(np.int32) for _ in range(count)]
        rows = [TokenRow(f"{name}{i}", row, np.arange(len(row)) >= 2) for i, row in enumerate(ids)]
        write_tokens(folder / f"{name}-tokens", rows)


def numbers(chain: Chain) -> dict[str, Any]:
    """Return all results of a chain of programs, without times and paths."""
    write_sets(chain.folder)
    (chain.folder / "draft").mkdir()
    versions = [chain.captured(name, TAPS)["data_version"] for name in ("train", "heldout")]
    return {"features": versions, "weights": chain.trained()["weights_digest"], "drafts": chain.evaluated()}


@pytest.fixture
def chains(tmp_path: Path, tiny_target: TargetFiles) -> dict[str, Chain]:
    made = {}
    for kind in ("local", "shared_dir"):
        (tmp_path / kind).mkdir()
        made[kind] = Chain(tmp_path / kind, tiny_target, StoreSpec(kind=kind, root=tmp_path / kind / "store"))
    return made


def test_capture_training_and_evaluation_are_the_same_through_both_kinds_of_store(chains: dict[str, Chain]):
    local, shared = (numbers(chain) for chain in chains.values())
    assert local["drafts"]["trained"]["eval/supervised_tokens"] > 0
    assert shared == local
    assert not list(chains["local"].folder.glob("store/samples"))
    assert not list(chains["shared_dir"].folder.glob("store/shards"))


@pytest.mark.parametrize("kind", ["local", "shared_dir"])
def test_only_what_a_store_lacks_is_captured_into_it(chains: dict[str, Chain], kind: str):
    chain = chains[kind]
    write_sets(chain.folder)
    first = chain.captured("heldout", [2])
    again = chain.captured("heldout", [2])
    wider = chain.captured("heldout", [2, 4])
    assert (first["captured_samples"], again["captured_samples"], wider["captured_samples"]) == (4, 0, 4)
    assert wider["captured_bytes"] * 2 == first["captured_bytes"]
    assert again["data_version"] == first["data_version"]
