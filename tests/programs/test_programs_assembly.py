"""Features belong to the tokens that they were captured from; equal sample ids are not enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import CaptureRun, FeatureSet, TargetFiles
from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.errors import StoreError
from draftworks.features.manifest import read_feature_set, write_feature_set
from draftworks.programs.assembly import open_samples
from draftworks.programs.capture import capture
from draftworks.programs.program import ProgramContext


class Reader:
    """The part of a strategy that `open_samples` uses."""

    name = "reader"
    feature_names = ("hf2", "last")


def rows(seed: int) -> list[TokenRow]:
    generator = np.random.default_rng(seed)
    return [TokenRow(f"s{i}", generator.integers(5, 99, 6).astype(np.int32), np.ones(6, np.bool_)) for i in range(5)]


@pytest.fixture
def run(tmp_path: Path, tiny_target: TargetFiles) -> CaptureRun:
    """Five samples, captured by the program."""
    write_tokens(tmp_path / "tokens", rows(seed=1))
    settings = CaptureSpec(dtype="float32", compute_dtype="float32", device="cpu")
    run = CaptureRun(
        out=tmp_path / "out", target=tiny_target, tokens=tmp_path / "tokens", taps=[2], capture=settings,
        store=tmp_path / "store",
    )  # fmt: skip
    report = capture(run, ProgramContext())
    assert report["captured_samples"] == 5
    return run


def opened(run: CaptureRun):
    return open_samples(FeatureSet(tokens=run.tokens, features=run.out), run.store, Reader(), run.target)


def test_captured_features_are_opened_with_their_tokens(run: CaptureRun):
    samples = opened(run)
    tensors, _ = samples.store.get(samples.refs[3])
    assert tensors["input_ids"].tolist() == rows(seed=1)[3].input_ids.tolist()
    assert tensors["last"].shape == (6, 128)


def test_features_of_other_tokens_under_the_same_ids_are_refused(run: CaptureRun):
    write_tokens(run.tokens, [*rows(seed=1)[:3], *rows(seed=2)[3:]])
    with pytest.raises(StoreError, match=r"features of 2 of 5 samples are of other tokens .* the first is s3. Capture"):
        opened(run)


def test_features_that_do_not_name_their_tokens_are_refused(run: CaptureRun):
    found = read_feature_set(run.out)
    nameless = [replace(ref, metadata={}) for ref in found.refs]
    write_feature_set(run.out, nameless, found.identity, found.streams, found.store)
    with pytest.raises(StoreError, match="features of 5 of 5 samples are of other tokens"):
        opened(run)


def test_other_masks_take_the_same_features(run: CaptureRun):
    masked = [TokenRow(row.sample_id, row.input_ids, np.arange(6) > 2) for row in rows(seed=1)]
    write_tokens(run.tokens, masked)
    samples = opened(run)
    assert samples.store.get(samples.refs[0])[0]["loss_mask"].tolist() == [False] * 3 + [True] * 3
