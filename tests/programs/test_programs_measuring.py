"""`plan --measure` on the embedded target, in this process: what it stores, and what a plan says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning_toys import PlannedTarget

from draftworks.config.run_files import MeasureRun
from draftworks.errors import ConfigError
from draftworks.planning.measured import list_samples
from draftworks.programs import measuring
from draftworks.programs.measure import measure
from draftworks.programs.program import ProgramContext

ENTRY = {
    "max_length": 300,
    "responses": {"max_new_tokens": 12},
    "capture": {"device": "cpu", "compute_dtype": "float32"},
    "strategies": {"eagle3": {"options": {"draft_vocab_size": 512}}},
}


def test_a_measured_sample_narrows_the_plan_and_time_that_is_up_widens_it(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    target = PlannedTarget(tmp_path, entry={"model": str(tiny_folder), **ENTRY})
    row = '{"messages": [{"role": "user", "content": "What does %d do?"}]}\n'
    (target.root / "registry" / "data" / "talks.jsonl").write_text("".join(row % number for number in range(40)))
    guessed = target.plan().amounts["train"]

    def run_here(python: str, run_file: Path, name: str) -> None:
        measure(MeasureRun.load(run_file), ProgramContext())

    monkeypatch.setattr(measuring, "_run_program", run_here)
    record = measuring.measure_target("one", target.registry, prompts=6, limit_s=60)
    plan = target.plan()
    train, steps = plan.amounts["train"], plan.ways["stored"]
    assert train.source.text.endswith("6 prompts answered")
    assert guessed.generated.low < train.generated.low <= train.generated.high <= guessed.generated.high
    assert guessed.tokens.low < train.tokens.low <= train.tokens.high < guessed.tokens.high
    for asset in ("responses", "training_features"):
        step = steps.find_step(asset)
        assert step is not None
        assert step.source.text.endswith("by plan --measure: 6 prompts")
    assert measuring.measure_target("one", target.registry, prompts=6, limit_s=1e-6) == record
    (sample,) = list_samples(target.artifacts.root, record.parent.name)
    assert (sample.asked, sample.finished, sample.capture) == (6, 0, None)
    assert sample.size.generated.low < 6
    assert sample.size.generated.high == 12
    target.edit(responses={"max_new_tokens": 13})
    assert "by --measure" not in target.plan().amounts["train"].source.text


def test_data_without_prompts_is_refused_before_an_engine_is_loaded(tmp_path: Path, tiny_folder: Path):
    target = PlannedTarget(tmp_path, entry={"model": str(tiny_folder), **ENTRY, "responses": {"mode": "passthrough"}})
    (target.root / "registry" / "data" / "talks.jsonl").write_text(
        '{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}\n' * 3
    )
    with pytest.raises(ConfigError, match="--measure found no prompts"):
        measuring.measure_target("one", target.registry)
