"""The program of rung 6: what it refuses, and that its server ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from fake_speculating_sglang import Script, fake_python
from processes import wait_until_ended
from waiting import HANG_S, wait_until

from draftworks.config.capture import SGLangSpec
from draftworks.config.run_files import ServeRun, TargetFiles
from draftworks.config.service import ServingSpec
from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.errors import ConfigError, EngineError, StoreError
from draftworks.programs.program import ProgramContext
from draftworks.programs.serve import measure_server

COMMAND = (
    "python -m sglang.launch_server --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT_FOLDER "
    "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
)


def serve_run(folder: Path, target: TargetFiles, script: Script, **serving: object) -> ServeRun:
    rows = [TokenRow("a", np.arange(5, 11, dtype=np.int32), np.array([0, 0, 0, 1, 1, 1], dtype=bool))]
    write_tokens(folder / "tokens", rows)
    (folder / "out").mkdir()
    return ServeRun(
        out=folder / "out",
        target=target,
        command=COMMAND,
        draft=folder / "draft",
        tokens=folder / "tokens",
        report=folder / "report",
        draft_tokens=2,
        serving=ServingSpec(**{"prompts": 1, "compute_dtype": "float32", "device": "cpu", **serving}),
        logs=folder / "server",
        sglang=SGLangSpec(python=str(fake_python(folder, script)), start_timeout_s=HANG_S, grace_s=2),
        max_length=64,
    )


def test_a_cpu_serves_in_float32_alone(tiny_target, tmp_path):
    run = serve_run(tmp_path, tiny_target, Script(), compute_dtype="bfloat16")
    with pytest.raises(ConfigError, match="compute_dtype: on a CPU expected float32, found bfloat16"):
        measure_server(run, ProgramContext())


def test_an_environment_without_our_platform_plug_in_is_refused_before_a_server_is_started(tiny_target, tmp_path):
    run = serve_run(tmp_path, tiny_target, Script())
    plain = run.sglang.model_copy(update={"python": sys.executable})
    with pytest.raises(
        ConfigError, match="cannot speculate on a CPU: expected a GPU, or this project's platform plug-in"
    ):
        measure_server(run.model_copy(update={"sglang": plain}), ProgramContext())
    assert not run.logs.exists()


def test_a_server_that_proposes_another_number_of_tokens_is_not_compared(tiny_target, tmp_path):
    run = serve_run(tmp_path, tiny_target, Script(verified=6))
    with pytest.raises(EngineError, match="SGLang proposes 5 tokens per pass, the walk that it is compared with 2"):
        measure_server(run, ProgramContext())
    assert "the fake server serves" in (run.logs / "sglang.log").read_text()


def test_nothing_is_published_without_a_walk_to_compare_with(tiny_target, tmp_path):
    run = serve_run(tmp_path, tiny_target, Script({"5 6 7": ([8, 9, 10], [0, 1])}))
    with pytest.raises(StoreError, match="expected a file of an evaluation report, found none"):
        measure_server(run, ProgramContext())
    assert not any(run.out.iterdir())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_is_cancelled_or_killed_leaves_no_server(tiny_target, tmp_path, signum):
    run = serve_run(tmp_path, tiny_target, Script(hangs=True))
    file = run.save(tmp_path / "run.yaml")
    program = subprocess.Popen([sys.executable, "-m", "draftworks.programs.serve", str(file)], start_new_session=True)
    try:
        wait_until((tmp_path / "asked").exists, "a request", possible=lambda: program.poll() is None)
        child = psutil.Process(int((tmp_path / "child").read_text()))
        server = child.parent()
        program.send_signal(signum)
        assert program.wait() == (128 + signum if signum == signal.SIGTERM else -signum)
        wait_until_ended(server)
        if signum == signal.SIGTERM:  # who is killed cannot look after a server's children: SGLang's own end with it
            wait_until_ended(child)
    finally:
        program.kill()
        program.wait()
        if (tmp_path / "child").exists():
            subprocess.run(["kill", "-9", (tmp_path / "child").read_text()], check=False, stderr=subprocess.DEVNULL)
