"""Real SGLang in the capturing process: the program under the launcher, its features, and no leftover processes."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import embedded_owner
import psutil
import pytest
from capture_toys import capture_run, random_rows
from processes import ending, lives, wait_until_ended
from sglang_toys import SGLANG
from torch import Tensor

from draftworks.capture.session import capture_features
from draftworks.capture.software import ENGINE_SOFTWARE, EnginePython
from draftworks.config.registry_files import ResponseSpec
from draftworks.config.run_files import CaptureRun, TargetFiles
from draftworks.data.tokenized import write_tokens
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store
from draftworks.servers.environment import link_package
from draftworks.storage.identity import LayerTap
from resources.local_launcher import LocalLauncher
from resources.workspace import Workspace
from spec_assets.common import launch

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

PYTHON = EnginePython(Path(SGLANG.python), ENGINE_SOFTWARE["sglang"])
TOLERANCE = 2e-5
"""As a share of the largest absolute value of a stream."""
ROWS = random_rows(9, seed=3, longest=100)
TAPS = [0, 1, 4, 7]


def launch_capture(run: CaptureRun, site: Path) -> dict[str, Any]:
    """Run the capture program with SGLang's Python, as the assets do, and return its report."""
    (site / "deployment.yaml").write_text("var: var\n")
    (site / "targets").mkdir(exist_ok=True)
    (site / "targets" / "tiny.yaml").write_text("{model: models/tiny, dataset: stdlib}\n")
    reports: list[dict[str, Any]] = []

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["tiny"]))
    def features(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        workspace = Workspace(registry_root=str(site))
        launcher = LocalLauncher(workdir=str(site / "runs"))
        reports.append(launch(context, launcher, workspace, "capture", run, 1, "cpu", PYTHON).report)
        return dg.MaterializeResult()

    dg.materialize([features], instance=dg.DagsterInstance.ephemeral(), partition_key="tiny")
    return reports[0]


@pytest.fixture(scope="module")
def captured(tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> CaptureRun:
    """A finished run of the capture program."""
    folder = tmp_path_factory.mktemp("embedded")
    run = capture_run(tiny_target, folder, backend="sglang", server={"args": ["--schedule-policy", "fcfs"]})
    run = run.model_copy(update={"taps": TAPS, "sglang": SGLANG})
    run.out.mkdir()
    write_tokens(run.tokens, ROWS)
    report = launch_capture(run, folder)
    assert report["captured_samples"] == len(ROWS)
    assert report["verification"]["head_equals_logits"]
    assert report["verification"]["features_as_captured"]
    return run


def read_features(run: CaptureRun) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Return tokens and features of every sample."""
    store = open_store(run.store)
    for ref in read_feature_set(run.out).refs:
        streams, handle = store.get(ref)
        yield ROWS[ref.metadata["row"]].input_ids.tolist(), streams
        store.release(handle)
    store.close()


def measure_relative_difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_features_of_the_program_equal_those_of_transformers_and_of_the_server(captured, tiny_engine, tiny_sglang):
    taps = [LayerTap(index) for index in TAPS]
    for row, streams in read_features(captured):
        for engine in (tiny_engine, tiny_sglang):
            (expected,) = engine.capture([row], taps)
            assert streams.keys() == expected.keys()
            for name, stream in expected.items():
                assert measure_relative_difference(streams[name], stream) <= TOLERANCE, name


def test_they_serve_for_a_capture_through_the_server_too(captured):
    behind_http = captured.capture.model_copy(update={"backend": "sglang_server"})
    run = captured.model_copy(update={"capture": behind_http})
    assert capture_features(run, lambda: pytest.fail("all of it is there"), ROWS).captured == 0


@pytest.mark.long
def test_threads_get_the_answers_of_transformers_and_a_kill_leaves_no_process(tiny_target, tiny_engine, tmp_path):
    prompts = [row.input_ids.tolist() for row in ROWS[:4]]
    asked = {
        "target": tiny_target.model_dump(),
        "folder": str(tmp_path / "engine"),
        "prompts": prompts,
        "new_tokens": 6,
    }
    process = subprocess.Popen(
        [SGLANG.python, embedded_owner.__file__],
        env={**os.environ, "PYTHONPATH": str(link_package(tmp_path / "package"))},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with ending(process) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        print(json.dumps(asked), file=owner.stdin, flush=True)
        answers = json.loads(owner.stdout.readline())
        ids = [str(index) for index in range(len(prompts))]
        expected = tiny_engine.generate(prompts, ResponseSpec(max_new_tokens=6), ids, tiny_target.context)
        assert answers == [list(each.ids) for each in expected]
        processes = psutil.Process(owner.pid).children(recursive=True)
        assert len([process for process in processes if lives(process)]) >= 2
        owner.kill()
        owner.wait()
        wait_until_ended(*processes)
