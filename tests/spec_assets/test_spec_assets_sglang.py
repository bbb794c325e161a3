"""The whole graph with the target in real SGLang: the same answers and an equally good draft as with transformers, from
stored features and from features that stream to two ranks.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from draftworks.storage.artifacts import Artifact, ArtifactStore

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


def made(site: Any, asset: str) -> Artifact:
    return ArtifactStore(site.var).load_current(asset, "small")


def test_the_graph_makes_the_same_draft_through_sglang(site, tiny_sglang, tmp_path_factory):
    served = site.copy(tmp_path_factory.mktemp("served"))
    server = f"server: {{url: '{tiny_sglang.url}', spool: '{tiny_sglang.spool}'}}"
    text = served.target_file.read_text()
    served.target_file.write_text(text.replace("capture: {", f"capture: {{backend: sglang_server, {server}, "))
    for each in (served, site):
        result = each.run()
        assert result.success, [event.message for event in result.all_events if event.is_failure]
    for asset in ("responses", "heldout_responses", "tokenized_train"):
        assert made(served, asset).data_version == made(site, asset).data_version
    assert made(served, "training_features").data_version != made(site, "training_features").data_version
    by_sglang, by_hf = (made(each, "eagle3_report").summary["drafts"]["trained"] for each in (served, site))
    for metric in ("eval/simulated_acc_len", "eval/rung3_walk_acc_len", "eval/avg_loss"):
        assert by_sglang[metric] == pytest.approx(by_hf[metric], rel=1e-3)
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
        assert streamed[metric] == pytest.approx(by_sglang[metric], rel=1e-3)
