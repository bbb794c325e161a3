"""vLLM inside this process, run by vLLM's Python, for the tests that ask it: several engines, one after another.

Reads `{"targets", "folder", "out"}` from its input, does what the tests compare with transformers or expect to fail, and
writes tensors and messages into the folder `out`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftworks.capture.engine import EnginePlace, TargetEngine, load_engine
from draftworks.capture.engines import vllm_loading
from draftworks.capture.engines.vllm_engine import VLLMEngine
from draftworks.capture.probe.probe import EngineProbe
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import CaptureRun, TargetFiles
from draftworks.data.tokenized import TokenizedSet
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import DraftworksError, EngineError
from draftworks.handover.spool import SpoolSink
from draftworks.storage.identity import LayerTap

CHUNK = 64
CAPTURE = CaptureSpec(
    backend="vllm",
    compute_dtype="float32",
    device="cpu",
    batch_tokens=512,
    server={"args": ["--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8"]},
)


@contextmanager
def loaded(target: TargetFiles, folder: Path, taps: Sequence[int] | None) -> Iterator[VLLMEngine]:
    place = EnginePlace(
        folder,
        None if taps is None else tuple(map(LayerTap, taps)),
        head=lambda: TargetParts.load(target).head,
    )
    engine = load_engine(target, CAPTURE, torch.device("cpu"), place)
    assert isinstance(engine, VLLMEngine)
    try:
        yield engine
    finally:
        engine.close()


def capture(engine: TargetEngine, asked: dict[str, Any], out: Path) -> None:
    """Capture one row alone, the last request of its engine, then all rows at once, the longest in chunks."""
    taps = list(map(LayerTap, asked["taps"]))
    alone = engine.capture([asked["rows"][0]], taps)
    together = engine.capture(asked["rows"], taps)
    for name, found in (("alone", alone), ("together", together)):
        for number, streams in enumerate(found):
            save_file({key: value.contiguous() for key, value in streams.items()}, out / f"{name}-{number}.safetensors")
    logits = torch.stack([each[-1] for each in engine.logits(asked["rows"])])
    save_file({"logits": logits}, out / "logits.safetensors")


def answer(engine: TargetEngine, asked: dict[str, Any], target: TargetFiles) -> list[list[int]]:
    made = engine.generate(asked["rows"], ResponseSpec(max_new_tokens=8), ["a", "b", "c"], target.context, end_ids=[2])
    return [[*each.ids, int(each.finished)] for each in made]


def tell(action: Any) -> str:
    """Return the message of what an action raises."""
    try:
        action()
    except DraftworksError as error:
        return str(error)
    return ""


def probe(engine: TargetEngine, run: CaptureRun) -> str:
    return tell(lambda: EngineProbe(run, TokenizedSet.open(run.tokens)).compare(engine))


def look_at(run: CaptureRun, asked: dict[str, Any], folder: Path, out: Path) -> dict[str, Any]:
    """Capture, answer and probe with an engine as it is, then with a full disk, and after a restart."""
    with loaded(run.target, folder, asked["taps"]) as engine:
        told: dict[str, Any] = {"tested": engine.tested, "name": engine.display_name}
        capture(engine, asked, out)
        told["answers"] = answer(engine, asked, run.target)
        told["probe"] = probe(engine, run)
        if "restart" in asked["also"]:
            with patched(SpoolSink, "_measure_room", lambda sink: 0), patched(engine, "_attempts", -4):
                told["full"] = tell(lambda: engine.capture([asked["rows"][0]], []))
            engine._host.revive(EngineError("a test ends it"))
            told["revived"] = tell(lambda: engine.capture([asked["rows"][0]], []))
    told["closed"] = tell(lambda: engine.capture([asked["rows"][0]], []))
    return told


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def look_at_wrong(run: CaptureRun, asked: dict[str, Any], folder: Path) -> dict[str, str]:
    """Probe engines that capture a layer too late, have other weights, or load no connector."""
    build = vllm_loading.build_server_options
    late = [[*[tap + 1 for tap in asked["taps"]], run.target.num_layers]]
    changes = {
        "late": {"speculative": vllm_loading.make_speculative_config(late[0])},
        "foreign": {"model": asked["foreign"]},
        "unloaded": {"kv_transfer": None},
    }
    told = {}
    for name, change in changes.items():
        with (
            patched(vllm_loading, "build_server_options", lambda *args, own=change: replace(build(*args), **own)),
            loaded(run.target, folder / name, asked["taps"]) as engine,
            patched(engine, "_attempts", -4),
        ):
            told[name] = probe(engine, run)
    return told


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    out, folder = Path(asked["out"]), Path(asked["folder"])
    run = CaptureRun.model_validate(asked["run"])
    told: dict[str, Any] = look_at(run, asked, folder / "sound", out)
    if "wrong" in asked["also"]:
        told |= look_at_wrong(run, asked, folder)
    (out / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
