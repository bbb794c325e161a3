"""Run files of a small training and evaluation: random features for the embedded target, ready in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import EvaluateRun, FeatureSet, TargetFiles, TrainRun
from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.data.vocab import build_vocab_mapping, count_supervised_tokens
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import FeatureSetIdentity, write_feature_set

STREAMS = ("hf2", "hf4", "hf5", "last")
OPTIONS = {"ttt_length": 2, "draft_vocab_size": 64, "intermediate_size": 32}
DFLASH_OPTIONS = {"block_size": 3, "num_layers": 1, "layer_ids": [2, 4, 5], "num_anchors": 8, "intermediate_size": 32}
TRAINING = TrainingSpec(
    global_batch_size=4, micro_batch_size=2, epochs=4, lr=5e-3, compute_dtype="float32", log_every=1, eval_every=4
)


@dataclass(frozen=True)
class RunFiles:
    """A folder with everything a training and an evaluation need."""

    folder: Path
    target: TargetFiles

    @classmethod
    def make(cls, folder: Path, target: TargetFiles) -> RunFiles:
        files = cls(folder, target)
        files.feature_set("train", samples=9, seed=1)
        files.feature_set("heldout", samples=3, seed=2)
        counts = count_supervised_tokens(TokenizedSet.open(folder / "train-tokens"), target.vocab_size)
        build_vocab_mapping(counts, OPTIONS["draft_vocab_size"]).save(folder / "vocab.safetensors")
        for out in ("draft", "report"):
            (folder / out).mkdir()
        return files

    def train_run(self, **changes: Any) -> TrainRun:
        run = TrainRun(
            out=self.folder / "draft",
            target=self.target,
            strategy="eagle3",
            options=OPTIONS,
            training=TRAINING,
            train=self._set("train"),
            heldout=self._set("heldout"),
            store=self.folder / "store",
            vocab_mapping=self.folder / "vocab.safetensors",
        )
        return run.model_copy(update=changes)

    def evaluate_run(self, **changes: Any) -> EvaluateRun:
        """Its real loop says little: every token is a pass of the target."""
        run = EvaluateRun(
            out=self.folder / "report",
            target=self.target,
            strategy="eagle3",
            options=OPTIONS,
            draft=self.folder / "draft",
            train_tokens=self.folder / "train-tokens",
            heldout=self._set("heldout"),
            store=self.folder / "store",
            vocab_mapping=self.folder / "vocab.safetensors",
            max_new_tokens=6,
            device="cpu",
        )
        return run.model_copy(update=changes)

    def _set(self, name: str) -> FeatureSet:
        return FeatureSet(tokens=self.folder / f"{name}-tokens", features=self.folder / f"{name}-features")

    def feature_set(self, name: str, samples: int, seed: int, first_supervised: int = 3) -> FeatureSet:
        """Tokens and features of samples of 8 to 23 tokens, supervised from `first_supervised` on."""
        generator = torch.Generator().manual_seed(seed)
        store = LocalFeatureStore(self.folder / "store")
        rows, refs = [], []
        for index in range(samples):
            length = int(torch.randint(8, 24, (), generator=generator))
            ids = torch.randint(0, 100, (length,), generator=generator)
            rows.append(TokenRow(f"{name}{index}", ids.int().numpy(), np.arange(length) >= first_supervised))
            keys = {stream: f"{name}-{index}-{stream}" for stream in STREAMS}
            ref = SampleRef(
                f"{name}{index}", "run", name, store.uri, keys, {}, target_model_version=self.target.digest,
                metadata={"tokens": rows[-1].token_digest},
            )  # fmt: skip
            width = self.target.hidden_size
            refs.append(store.put(ref, {s: torch.randn(length, width, generator=generator) for s in STREAMS}))
        store.flush()
        store.close()
        write_tokens(self.folder / f"{name}-tokens", rows)
        write_feature_set(
            self.folder / f"{name}-features", refs, FeatureSetIdentity(dtype="float32"), STREAMS, store.uri
        )
        return self._set(name)
