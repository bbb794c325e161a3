"""Real SGLang speculates with our exports, on CPU, and accepts what the walk said: rung 6 equals rung 3, count for count."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pytest
from sglang_toys import SGLANG

from draftworks.programs.serve import RESULT
from draftworks.storage.artifacts import ArtifactStore

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

EXPORT = "    export: {dtype: float32}\n"
"""The dtype of training: rounded weights may propose other tokens."""
DFLASH = """  dflash:
    options: {block_size: 3, mask_token_id: 3, num_layers: 1, layer_ids: [2, 4, 5], num_anchors: 8}
    training: {global_batch_size: 8, micro_batch_size: 8, epochs: 10, lr: 0.01, compute_dtype: float32, device: cpu}
"""
SERVING = "{loop: {prompts: 0}, serving: {prompts: 3, concurrency: 3, compute_dtype: float32, device: cpu}}"


@dataclass(frozen=True)
class Served:
    """A site on which `everything` has run for a target with a serving check and a strategy that learns fast."""

    site: Any
    result: dg.ExecuteInProcessResult
    strategy: str
    algorithm: str


@pytest.fixture(
    scope="module",
    params=[("eagle3", "EAGLE3"), pytest.param(("dflash", "DFLASH"), marks=pytest.mark.long)],
    ids=lambda names: names[0],
)
def served(shared_site, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    strategy, algorithm = request.param
    site = shared_site.copy(tmp_path_factory.mktemp(strategy))
    text = site.target_file.read_text().replace("epochs: 3, lr: 0.002", "epochs: 10, lr: 0.01")
    text = text.rstrip() + "\n"
    if strategy == "dflash":
        text = text[: text.index("  eagle3:\n")] + DFLASH
    site.target_file.write_text(text + EXPORT)
    site.evaluate(SERVING)
    (site.registry / "deployment.yaml").write_text(f"sglang: {{python: {SGLANG.python}}}\n")
    result = site.run()
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    return Served(site, result, strategy, algorithm)


def test_a_live_server_accepts_what_the_walk_said(served: Served):
    found = ArtifactStore(served.site.var).load_current(f"{served.strategy}_serving", "small")
    assert found.summary["algorithm"] == served.algorithm
    assert found.summary["same_answers"] == found.summary["answers"] == 3
    assert found.summary["walk"]["equal"] == found.summary["walk"]["prompts"] == 3
    assert found.summary["acceptance"]["accepted"] > 0  # an equal count of nothing would say little
    # The server's own counters are of these requests and no others.
    server, measured = found.summary["server"], json.loads((found.path / RESULT).read_text())
    assert server["tokens"] == found.summary["tokens"]
    assert server["passes"] == sum(map(sum, measured["prompts"].values()))
    checks = {check.asset_key.to_user_string(): check for check in served.result.get_asset_check_evaluations()}
    assert checks[f"{served.strategy}_serving"].passed
