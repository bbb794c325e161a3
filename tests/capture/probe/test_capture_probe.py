"""The probe compares an engine with the target's weights: rounding passes, another model or layer does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from capture_toys import OneLayerOff, WatchedEngine, capture_run, changed_copy, random_rows
from coverings import gate_or_long
from model_families import FAMILIES
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftworks.capture.engine import load_engine
from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.capture.probe.probe import EngineProbe, choose_probe_prompts
from draftworks.capture.probe.streamed_forward import StreamedTarget
from draftworks.capture.session import capture_missing
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import CaptureRun, TargetFiles
from draftworks.errors import StoreError, UnsoundEngineError
from draftworks.features.open_store import open_store
from draftworks.storage.identity import LayerTap

CPU = torch.device("cpu")
ROWS = random_rows(5, longest=60)


def load_engine_of(target: TargetFiles, dtype: str = "float32") -> HFTargetEngine:
    return load_engine(target, CaptureSpec(compute_dtype=dtype, device="cpu"), CPU)


@pytest.fixture
def run(tiny_target: TargetFiles, tmp_path: Path) -> CaptureRun:
    return capture_run(tiny_target, tmp_path)


@pytest.fixture(scope="module")
def changed_target(
    tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[float], TargetFiles]:
    """Return a function that copies the target and scales what its fourth layer writes by a factor."""
    return lambda share: changed_copy(tiny_target, tmp_path_factory.mktemp("changed"), share)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_target_itself_passes_in_its_dtype(run: CaptureRun, tiny_target: TargetFiles, dtype: str):
    spec = run.capture.model_copy(update={"compute_dtype": dtype})
    report = EngineProbe(run.model_copy(update={"capture": spec}), ROWS).compare(load_engine_of(tiny_target, dtype))
    assert (tuple(report.differences), report.not_compared) == (("hf2", "hf4", "last"), ())
    assert all(report.allowed[name] > 0 for name in report.differences)
    assert report.to_json()["probe_compared"] == "hf2, hf4, last"


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_of_every_family_are_those_of_transformers(family_target, family: str):
    target = family_target(family)
    engine, streamed = load_engine_of(target), StreamedTarget(target)
    rows = [row.input_ids.tolist() for row in ROWS[:3]]
    expected = engine.capture(rows, [LayerTap(k) for k in range(target.num_layers)])
    found = streamed.run(rows, target.num_layers, torch.float32).exact
    assert sorted(found) == sorted(expected[0])
    for index, streams in enumerate(expected):
        for name, stream in streams.items():
            assert torch.allclose(found[name][index], stream, atol=1e-4 * float(stream.abs().max())), name
    assert all(parameter.is_meta for layer in streamed._layers for parameter in layer.parameters())


def corrupt(streams: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    if how == "swapped":
        return {**streams, "hf2": streams["hf4"], "hf4": streams["hf2"]}
    if how == "zero":
        return {**streams, "hf4": torch.zeros_like(streams["hf4"])}
    if how == "wide":
        return {**streams, "hf4": torch.cat([streams["hf4"], streams["hf4"]], dim=1)}
    return {name: stream.half() for name, stream in streams.items()}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("swapped", r"stream hf2 differs by .*; it is hf4 \(difference .*\n.*stream hf4 differs by .*; it is hf2"),
        ("zero", "stream hf4: all .* values are zero"),
        ("wide", r"stream hf4: expected \(positions, 128\) in float32, found \(\d+, 256\)"),
        ("half", "in float16"),
    ],
)
def test_what_is_not_what_it_is_called_is_refused_by_name(
    run: CaptureRun, watched: WatchedEngine, how: str, message: str
):
    watched.damage = lambda streams: corrupt(streams, how)
    with pytest.raises(UnsoundEngineError, match=message):
        EngineProbe(run, ROWS).compare(watched)


# In bfloat16 more is allowed, so that a neighbour is told apart less easily.
@pytest.mark.parametrize(
    ("tap", "dtype"),
    gate_or_long(product(range(2, 7), ["float32", "bfloat16"]), lambda cell: cell[1] == "bfloat16" or cell[0] == 4),
)
def test_one_layer_off_is_refused_at_every_tap(run: CaptureRun, tiny_target: TargetFiles, tap: int, dtype: str):
    changed = {"taps": [tap], "capture": run.capture.model_copy(update={"compute_dtype": dtype})}
    probe = EngineProbe(run.model_copy(update=changed), ROWS)
    with pytest.raises(UnsoundEngineError, match=rf"stream hf{tap} differs by .*; it is hf{tap + 1} "):
        probe.compare(OneLayerOff(load_engine_of(tiny_target, dtype)))


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.01), ("bfloat16", 0.5)])
def test_other_weights_are_refused(run: CaptureRun, changed_target, dtype: str, share: float):
    spec = run.capture.model_copy(update={"compute_dtype": dtype})
    with pytest.raises(UnsoundEngineError, match="stream hf4 differs by .* expected at most") as raised:
        EngineProbe(run.model_copy(update={"capture": spec}), ROWS).compare(
            load_engine_of(changed_target(share), dtype)
        )
    assert "stream hf2" not in str(raised.value)  # which the changed layer comes after


def test_a_budget_that_reaches_the_lowest_taps_compares_those_and_names_the_others(
    run: CaptureRun, watched, changed_target
):
    sizes = StreamedTarget(run.target).list_layer_bytes()
    capture = run.capture.model_copy(update={"probe_gb": sum(sizes[:3]) / 1e9})
    report = EngineProbe(run.model_copy(update={"capture": capture}), ROWS).compare(watched)
    assert (tuple(report.differences), report.not_compared) == (("hf2",), ("hf4", "last"))
    assert "hf4, last not compared with the target's own weights: capture.probe_gb = " in report.describe()
    assert "reaches 3 of 8 layers" in report.describe()


def test_what_cannot_be_compared_is_refused_unless_the_registry_says_so(run: CaptureRun, watched, tmp_path: Path):
    def make_probe(**changes) -> EngineProbe:
        return EngineProbe(run.model_copy(update={"capture": run.capture.model_copy(update=changes)}), ROWS)

    with pytest.raises(
        UnsoundEngineError, match=r"probe_gb = 1e-06 reaches 0 of 8 layers.*capture.allow_unprobed: true"
    ):
        make_probe(probe_gb=1e-6).compare(watched)
    quantised = run.capture.server.model_copy(update={"args": ["--quantization", "fp8", "--kv-cache-dtype", "auto"]})
    with pytest.raises(UnsoundEngineError, match="server.args has --quantization, which changes the numerical results"):
        make_probe(server=quantised).compare(watched)
    report = make_probe(server=quantised, allow_unprobed=True).compare(watched)
    assert (report.differences, report.not_compared) == ({}, ("hf2", "hf4", "last"))
    assert "--quantization" in report.to_json()["probe"]


def test_a_quantised_checkpoint_cannot_be_compared(run: CaptureRun, watched, tmp_path: Path):
    folder = shutil.copytree(run.target.model, tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    target = run.target.model_copy(update={"model": str(folder)})
    with pytest.raises(UnsoundEngineError, match=r"the checkpoint is quantised \(mxfp4\)"):
        EngineProbe(run.model_copy(update={"target": target}), ROWS).compare(watched)


def test_a_family_that_transformers_does_not_know_cannot_be_compared(run: CaptureRun, watched, tmp_path: Path):
    folder = shutil.copytree(run.target.model, tmp_path / "unknown")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))
    unknown = run.model_copy(update={"target": run.target.model_copy(update={"model": str(folder)})})
    with pytest.raises(UnsoundEngineError, match=r"(?s)its layers cannot be run here: .*nobody_knows.*allow_unprobed"):
        EngineProbe(unknown, ROWS).compare(watched)
    allowed = unknown.model_copy(update={"capture": run.capture.model_copy(update={"allow_unprobed": True})})
    assert EngineProbe(allowed, ROWS).compare(watched).differences == {}
    watched.tested = False
    with pytest.raises(UnsoundEngineError, match="of a version that Draftworks was not tested with"):
        EngineProbe(allowed, ROWS).compare(watched)


def test_a_tensor_that_is_not_in_the_files_is_named(run: CaptureRun, watched, tmp_path: Path):
    folder = shutil.copytree(run.target.model, tmp_path / "lacking")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StoreError, match="1 tensors are missing .*, the first model.layers.3.mlp.down_proj.weight"):
        EngineProbe(
            run.model_copy(update={"target": run.target.model_copy(update={"model": str(folder)})}), ROWS
        ).compare(watched)


def test_a_server_that_changes_while_it_captures_leaves_nothing_of_that_time(
    run: CaptureRun, watched: WatchedEngine, changed_target
):
    later = load_engine_of(changed_target(0.05))
    first, probe = watched._engine, EngineProbe(run, ROWS)
    probe.compare(watched)

    def swap(now) -> None:
        watched._engine = later if now.done > 2 else first

    with pytest.raises(UnsoundEngineError, match=r"(?s)stream hf4 differs.*The last 5 samples .* are not stored"):
        capture_missing(run, watched, ROWS, progress=swap, confirm=probe.confirm)
    assert open_store(run.store).health()["tensors"] == 0
    watched._engine = first
    assert capture_missing(run, watched, ROWS, confirm=probe.confirm).captured == 5


def test_an_engine_that_can_change_is_confirmed_as_often_as_a_shard_is_full(run: CaptureRun, watched: WatchedEngine):
    confirmed: list[int] = []
    rows = random_rows(9, seed=3, longest=60)
    spec = run.capture.model_copy(update={"batch_tokens": 1, "shard_mb": 1})
    wide = run.model_copy(update={"capture": spec, "taps": list(range(8))})
    store = lambda: confirmed.append(open_store(run.store).health()["tensors"])  # noqa: E731
    capture_missing(wide, watched, rows, confirm=lambda engine: store())
    assert confirmed == sorted(confirmed)
    assert open_store(run.store).health()["tensors"] == 81


def test_prompts_are_short_pieces_of_samples(run: CaptureRun):
    rows = random_rows(40, longest=200)
    found = choose_probe_prompts(rows)
    assert [len(row) for row in found] == [64, 24, 24]
    samples = [row.input_ids.tolist() for row in rows]
    assert found[0] in [sample[:64] for sample in samples]
    assert all(row in [sample[-24:] for sample in samples] for row in found[1:])
    assert [len(row) for row in choose_probe_prompts(rows[:1])] == [min(64, len(rows[0]))]


def test_layer_bytes_are_those_of_the_files(tiny_target: TargetFiles):
    with safe_open(Path(tiny_target.model) / "model.safetensors", "pt") as stream:
        sizes = {name: stream.get_tensor(name).nbytes for name in stream.keys()}  # noqa: SIM118
    expected = [sum(size for name, size in sizes.items() if f"layers.{k}." in name) for k in range(8)]
    assert StreamedTarget(tiny_target).list_layer_bytes() == expected
