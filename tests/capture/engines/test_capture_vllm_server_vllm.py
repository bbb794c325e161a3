"""Real vLLM behind HTTP: what it hands over is what transformers computes, also after it was killed; others are told."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from capture_toys import changed_copy
from processes import kill_all
from sglang_toys import CPU
from vllm_toys import VLLM

from draftworks.capture.engine import EnginePlace, load_engine
from draftworks.capture.engines.server_hosts import ManagedHost
from draftworks.capture.engines.vllm_engine import VLLMEngine
from draftworks.capture.probe.probe import FLOORS
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import EngineError
from draftworks.storage.identity import LayerTap

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

TAPS = (LayerTap(0), LayerTap(2), LayerTap(5))
ROWS = [[(31 * index + 7) % 1990 + 5 for index in range(length)] for length in (9, 150, 1)]


def load(target: TargetFiles, folder: Path, **server: object) -> VLLMEngine:
    parts = partial(TargetParts.load, target)
    place = EnginePlace(folder, TAPS, lambda: parts().head, lambda: parts().embedding, vllm=VLLM)
    capture = CaptureSpec.model_validate(
        {"backend": "vllm_server", "compute_dtype": "float32", "dtype": "float32", "device": "cpu", "server": server}
    )
    engine = load_engine(target, capture, CPU, place)
    assert isinstance(engine, VLLMEngine)
    return engine


@pytest.fixture(scope="module")
def engine(tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    made = load(tiny_target, tmp_path_factory.mktemp("vllm"))
    yield made
    made.close()


def require_equal(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, stream in theirs.items():
            assert float((ours[name] - stream).abs().max() / stream.abs().max()) < FLOORS[torch.float32], name


def test_streams_logits_and_answers_are_those_of_transformers(
    engine: VLLMEngine, tiny_engine, tiny_target: TargetFiles
):
    require_equal(engine.capture(ROWS, TAPS), tiny_engine.capture(ROWS, TAPS))
    [found, *_] = engine.logits(ROWS)
    expected = tiny_engine.logits(ROWS)[0][-1:]
    assert float((found - expected).abs().max()) < 1e-3
    asked = (ROWS, ResponseSpec(max_new_tokens=8), ["a", "b", "c"], tiny_target.context)
    assert engine.generate(*asked, end_ids=[2]) == tiny_engine.generate(*asked, end_ids=[2])
    assert not list(engine.spool.iterdir())  # all that was written is taken and removed


def test_a_server_of_yours_is_examined_and_gives_the_same(
    engine: VLLMEngine, tiny_engine, tiny_target: TargetFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = {"url": engine.url, "spool": str(engine.spool)}
    external = load(tiny_target, tmp_path / "a", **place)
    require_equal(external.capture(ROWS, TAPS), tiny_engine.capture(ROWS, TAPS))
    external.close()
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    other = changed_copy(tiny_target, tmp_path / "other", 0.5)
    with pytest.raises(
        EngineError, match=r"expected \S*other\S*\. If it is the same .* A server that fits: PYTHONPATH="
    ):
        load(other, tmp_path / "b", **place)
    (tmp_path / "nowhere").mkdir()
    monkeypatch.setattr("draftworks.capture.engines.parts_engine._LONGEST_WAIT_S", 0.0)
    with pytest.raises(EngineError, match="wrote no hidden states .* Check that it is loaded"):
        load(tiny_target, tmp_path / "c", url=engine.url, spool=str(tmp_path / "nowhere"))


def test_a_server_that_was_killed_in_the_middle_is_started_again(engine: VLLMEngine, tiny_engine):
    host = engine._host
    assert isinstance(host, ManagedHost)
    assert host.pid is not None
    process = psutil.Process(host.pid)
    kill_all([*process.children(recursive=True), process])
    require_equal(engine.capture(ROWS, TAPS), tiny_engine.capture(ROWS, TAPS))
