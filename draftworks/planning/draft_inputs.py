"""The inputs of a draft, as the results that exist give them, and the identity that they decide. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.config.draft_options import read_draft_config
from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import VOCAB_FILE, FeatureSet, TargetFiles
from draftworks.config.strategies import StrategySpec
from draftworks.storage.artifacts import Artifact
from draftworks.storage.identity import digest
from draftworks.storage.records import DraftIdentity, EvalData


@dataclass(frozen=True)
class DraftInputs:
    """Resolved inputs of a draft.

    Attributes:
        feature_versions: content versions of the streams that this strategy reads, by name, as in `heldout_data`. A
            tap that only another strategy reads is not included, so it does not cause a new training.
        arrival: see `DraftIdentity`.
    """

    files: TargetFiles
    options: dict[str, Any]
    training: TrainingSpec
    train_tokens: Artifact
    train_features: Artifact
    heldout: FeatureSet
    feature_versions: dict[str, str]
    heldout_data: EvalData
    vocab_mapping: Artifact | None
    start_from: Path | None
    arrival: Mapping[str, Any] | None = None

    def to_identity(self, strategy: StrategySpec) -> DraftIdentity:
        options = strategy.parse_options(self.options, where=f"options of {strategy.name}")
        return DraftIdentity(
            strategy=strategy.name,
            options=strategy.identify_options(options, self.files.hidden_size, self.files.num_heads),
            start_from=None if self.start_from is None else read_draft_config(self.start_from).weights_digest,
            training=self.training.to_identity(strategy.batch_means(options)),
            target=self.files.digest,
            tokens=self.train_tokens.data_version,
            features=digest(self.feature_versions),
            vocab_mapping=None if self.vocab_mapping is None else self.vocab_mapping.data_version,
            heldout=self.heldout_data,
            arrival=self.arrival,
        )

    def locate_vocab_file(self) -> Path | None:
        """Return the vocabulary mapping's file: that of the draft to start from, if there is one, since its head was
        made for it."""
        if self.vocab_mapping is None:
            return None
        return (self.start_from or self.vocab_mapping.path) / VOCAB_FILE
