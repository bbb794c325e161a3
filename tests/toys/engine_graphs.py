"""The whole graph with another engine than transformers: stored, then streamed to two ranks."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from draftworks.storage.artifacts import Artifact, ArtifactStore


def made(site: Any, asset: str) -> Artifact:
    return ArtifactStore(site.var).load_current(asset, "small")


def require_same_draft(served: Any, site: Any) -> None:
    """Run both sites, and require the same answers and an equally good draft, and of a stream on `served` once more."""
    for each in (served, site):
        result = each.run()
        assert result.success, [event.message for event in result.all_events if event.is_failure]
    for asset in ("responses", "heldout_responses", "tokenized_train"):
        assert made(served, asset).data_version == made(site, asset).data_version
    assert made(served, "training_features").data_version != made(site, "training_features").data_version
    by_server, by_hf = (made(each, "eagle3_report").summary["drafts"]["trained"] for each in (served, site))
    for metric in ("eval/simulated_acc_len", "eval/rung3_walk_acc_len", "eval/avg_loss"):
        assert by_server[metric] == pytest.approx(by_hf[metric], rel=1e-3)
    assert by_hf["eval/rung3_walk_acc_len"] > 0

    stored = made(served, "training_features").data_version
    for asset in ("training_features", "eagle3_draft", "eagle3_report", "eagle3_export"):
        shutil.rmtree(served.var / asset / "small")
    text = served.target_file.read_text().replace("processes: 1", "processes: 2")
    served.target_file.write_text(text + "streaming: {watermark: {samples: 16}}\n")
    result = served.run()
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    assert made(served, "training_features").data_version == stored
    assert made(served, "eagle3_draft").summary["stream"]["captured_samples"] > 0
    assert made(served, "eagle3_draft").summary["world_size"] == 2
    streamed = made(served, "eagle3_report").summary["drafts"]["trained"]
    for metric in ("eval/simulated_acc_len", "eval/rung3_walk_acc_len", "eval/avg_loss"):
        assert streamed[metric] == pytest.approx(by_server[metric], rel=1e-3)
