"""Real vLLM speculates with our exports on a CPU as the walk said, count for count; above temperature 0 it is not asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from waiting import HANG_S

from draftworks.programs.serve import RESULT
from draftworks.storage.artifacts import Artifact, ArtifactStore

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
PROMPTS = 4
EVALUATION = (
    f"{{loop: {{prompts: {PROMPTS}, temperatures: [0, 0.6]}}, serving: {{engines: [vllm], temperatures: [0.6], "
    f"prompts: {PROMPTS}, concurrency: {PROMPTS}, compute_dtype: float32, device: cpu}}}}"
)


@pytest.fixture(scope="module")
def served(shared_site, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The serving check of a draft that learned fast, exported in the dtype of training."""
    site = shared_site.copy(tmp_path_factory.mktemp("eagle3"))
    text = site.target_file.read_text().replace("epochs: 3, lr: 0.002", "epochs: 10, lr: 0.01")
    site.target_file.write_text(text.rstrip() + "\n    export: {dtype: float32}\n")
    site.evaluate(EVALUATION)
    vllm = f"{{python: {PYTHON}, start_timeout_s: {HANG_S}, grace_s: 10}}"
    (site.registry / "deployment.yaml").write_text(f"vllm: {vllm}\n")
    result = site.run()
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    checks = {check.asset_key.to_user_string(): check for check in result.get_asset_check_evaluations()}
    assert checks["eagle3_serving"].passed
    return ArtifactStore(site.var).load_current("eagle3_serving", "small")


def test_a_live_vllm_accepts_what_the_walk_said(served: Artifact):
    found = served.summary
    assert (found["engine"], found["algorithm"]) == ("vllm", "eagle3")
    assert found["same_answers"] == found["answers"] == PROMPTS
    assert found["walk"]["equal"] == found["walk"]["prompts"] == PROMPTS
    assert found["acceptance"]["accepted"] > 0  # an equal count of nothing would say little
    # The server's own counters are of these requests and no others.
    measured = json.loads((served.path / RESULT).read_text())
    assert found["server"]["tokens"] == found["tokens"]
    assert found["server"]["passes"] == sum(map(sum, measured["prompts"].values()))


def test_nothing_is_sampled_where_the_server_loses_the_temperature(served: Artifact):
    """0.32.0 on a CPU: see tests/production/test_production_vllm.py."""
    assert served.summary["sampled"] == []
