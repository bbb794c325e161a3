"""A small EAGLE-3 training run for the embedded target, on random features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import FeatureSet, StoreSpec, TargetFiles, TrainRun
from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.data.vocab import build_vocab_mapping, count_supervised_tokens
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import FeatureSetIdentity, write_feature_set
from draftworks.targets.resolve import digest_target_files

TINY = Path(__file__).resolve().parents[1] / "registry" / "models" / "tiny"
STREAMS = ("hf2", "hf4", "hf5", "last")
RANKS = 2


def write_random_training(folder: Path, steps: int, samples: int = 33, lengths: range = range(8, 40)) -> TrainRun:
    """Write random features for the embedded target; return a run that trains on them and saves after every step."""
    target = digest_target_files(
        TargetFiles(
            name="tiny",
            model=str(TINY),
            tokenizer=str(TINY),
            digest="",
            tokenizer_digest="",
            num_layers=8,
            hidden_size=128,
            vocab_size=2048,
            context=512,
        )
    )
    train, heldout = (
        write_random_set(folder, "train", samples, target, lengths),
        write_random_set(folder, "heldout", 24, target),
    )
    vocab = folder / "vocab.safetensors"
    build_vocab_mapping(count_supervised_tokens(TokenizedSet.open(train.tokens), target.vocab_size), 64).save(vocab)
    training = TrainingSpec(
        processes=RANKS,
        global_batch_size=8,
        micro_batch_size=2,
        epochs=steps,
        max_steps=steps,
        lr=1e-3,
        compute_dtype="float32",
        device="cpu",
        eval_every=2,
        save_every=1,
    )
    return TrainRun(
        out=folder,
        target=target,
        strategy="eagle3",
        options={"ttt_length": 3, "draft_vocab_size": 64, "intermediate_size": 64},
        training=training,
        train=train,
        heldout=heldout,
        store=StoreSpec(root=folder / "store"),
        vocab_mapping=vocab,
    )


def write_random_set(
    folder: Path, name: str, samples: int, target: TargetFiles, lengths: range = range(8, 40)
) -> FeatureSet:
    """Write the tokens and features of samples of 8 to 39 tokens, or of other lengths."""
    generator = torch.Generator().manual_seed(samples)
    store = LocalFeatureStore(folder / "store")
    rows, refs = [], []
    for index in range(samples):
        length = int(torch.randint(lengths.start, lengths.stop, (), generator=generator))
        tokens = torch.randint(0, 100, (length,), generator=generator)
        row = TokenRow(f"{name}{index}", tokens.int().numpy(), np.arange(length) >= 3)
        keys = {stream: f"{name}-{index}-{stream}" for stream in STREAMS}
        ref = SampleRef(
            row.sample_id, "kills", name, store.uri, keys, {}, target_model_version=target.digest,
            metadata={"tokens": row.token_digest},
        )  # fmt: skip
        tensors = {stream: torch.randn(length, target.hidden_size, generator=generator) for stream in STREAMS}
        rows.append(row)
        refs.append(store.put(ref, tensors))
    store.close()
    found = FeatureSet(tokens=folder / f"{name}-tokens", features=folder / f"{name}-features")
    write_tokens(found.tokens, rows)
    write_feature_set(found.features, refs, FeatureSetIdentity(dtype="float32"), STREAMS, store.uri)
    return found
