"""Results of a target as its assets would publish them: the identities are theirs, the figures are made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import dagster as dg
from planning_toys import LLAMA_8B

from draftworks.config.strategies import resolve_strategy
from draftworks.errors import DraftworksError
from draftworks.export.conventions import CARD
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult
from draftworks.storage.identity import DigestNotCached, FileDigests, digest
from draftworks.storage.names import FP8_GATE, HELDOUT
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import collect_taps
from spec_assets import data, features, fp8_gate
from spec_assets.common import NothingToDo
from spec_assets.drafts import make_draft_asset
from spec_assets.evals import find_eval_users, make_eval_features_asset, make_eval_set_assets
from spec_assets.exports import make_export_asset
from spec_assets.reports import make_report_asset
from spec_assets.unchanged import Probed, ProbeStore, ProbeWorkspace, ask_asset

SAMPLES = {"train": 900, "heldout": 100}
TOKENS = 300
"""Of each sample."""
FIGURES = {"rows": 1000, "rejected": 0, "duplicates": 0, "conversations": 500, "kind": "conversations", **SAMPLES}
PASSED = {"verdict": "passed", "loss": 0.0, "low": -0.01, "high": 0.001, "confidence": 0.95, "by_seed": [0.0]}
PASSED |= {"prompts": 100, "max_loss": 0.01}


@dataclass(frozen=True)
class PublishingStore(ArtifactStore):
    """Publishes in place of building, with figures that give no rate."""

    registry: Path = Path()

    def obtain(self, asset: str, target: str, identity: dict[str, Any], *_: Any, **options: Any) -> Artifact:
        samples = SAMPLES["train" if identity.get("part", "train") == "train" else "heldout"]
        taps = collect_taps(Registry(self.registry).load_target(target), LLAMA_8B["num_hidden_layers"])
        streams = {name: digest([name, identity]) for name in (*(f"hf{tap}" for tap in taps), "last")}
        figures: dict[str, Any] = {"samples": samples, "tokens": samples * TOKENS, "bytes": samples * TOKENS * 1000}
        figures |= {"supervised_tokens": samples * TOKENS // 2, "stream_versions": streams, "evals": {}}
        if asset in ("conversations",) or asset.endswith("_set"):
            figures = dict(FIGURES)
        if asset == FP8_GATE:
            figures = {"strategies": dict.fromkeys(("eagle3", "dflash"), PASSED)}
        if asset == "training_features" and Registry(self.registry).load_target(target).streaming is not None:
            figures["planned"] = True

        def build(folder: Path) -> BuildResult:
            (folder / CARD).write_text(asset)
            return BuildResult(digest([asset, target, identity]), figures)

        super().obtain(asset, target, identity, build)
        raise Probed(True)


class AskedStore(ProbeStore):
    """Says what an asset would find, whether or not feature stores hold what its record names."""

    def obtain(self, asset: str, target: str, identity: dict[str, Any], *_: Any, **options: Any) -> Artifact:
        raise Probed(self.is_current(asset, target, identity))


class AskedWorkspace(ProbeWorkspace):
    @cached_property
    def artifacts(self) -> ArtifactStore:
        return AskedStore(self.var, self.digests)


class PublishingWorkspace(ProbeWorkspace):
    @cached_property
    def artifacts(self) -> ArtifactStore:
        return PublishingStore(self.var, self.digests, self.registry.root)

    @cached_property
    def digests(self) -> FileDigests:
        return FileDigests(self.var / "digests.json")


def list_assets(target: str, registry: Registry) -> list[dg.AssetsDefinition]:
    """Return the assets of a target that a plan knows, in the order in which a run makes them."""
    spec = registry.load_target(target)
    sets = [make_eval_set_assets(name) for name in spec.evals]
    strategies = [resolve_strategy(name) for name in spec.strategies]
    users = find_eval_users(registry, spec.evals)
    return [
        *(data.conversations, data.responses, data.heldout_responses),
        *(each for pair in sets for each in pair),
        data.tokenized_train,
        data.vocab_mapping,
        *(make_eval_features_asset(name) for name in (HELDOUT, *spec.evals)),
        *([fp8_gate.fp8_gate] if spec.capture.storage != "plain" else []),
        features.training_features,
        *(make_draft_asset(each) for each in strategies),
        *(make_report_asset(each, users) for each in strategies),
        *(make_export_asset(each) for each in strategies),
    ]


def publish_results(target: str, registry: Registry) -> Iterator[str]:
    """Publish one result after the other; yield the name of each asset that has one."""
    workspace = PublishingWorkspace(registry_root=str(registry.root))
    for each in list_assets(target, registry):
        try:
            made = ask_asset(each, workspace, target)
        except NothingToDo:
            continue
        if made:
            yield each.key.to_user_string()


def ask_assets(target: str, registry: Registry) -> dict[str, bool]:
    """Return of each asset whether it and all before it would find their results made, as their own functions say."""
    workspace, found = AskedWorkspace(registry_root=str(registry.root)), dict[str, bool]()
    for each in list_assets(target, registry):
        before = {key.to_user_string() for key in each.asset_deps[each.key]}
        try:
            made = ask_asset(each, workspace, target)
        except (NothingToDo, DraftworksError, DigestNotCached):
            made = False
        found[each.key.to_user_string()] = made and all(found.get(name, True) for name in before)
    return found
