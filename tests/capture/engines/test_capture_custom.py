"""A user's engine: its features have separate keys, and invalid results are never stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from capture_toys import capture_run, random_rows
from custom_engines import DAMAGES

from draftworks.capture.answers.answer_sets import make_answers_identity
from draftworks.capture.capture_plan import StreamPlan, make_refs
from draftworks.capture.engine import Generated, load_engine, make_engine_identity
from draftworks.capture.engines.custom import CheckedEngine
from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.capture.session import capture_features
from draftworks.config.registry_files import CaptureSpec, ResponseSpec, TargetSpec
from draftworks.config.run_files import CaptureRun, RegenerateRun, TargetFiles
from draftworks.config.strict_yaml import parse_spec
from draftworks.errors import CaptureError, ConfigError, EngineError
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.open_store import open_store
from draftworks.storage.identity import EngineIdentity, LayerTap

ROWS = random_rows(4)
ENGINE = {"entry_point": "custom_engines:load", "engine": "mylab", "numerics": 2}
CPU = torch.device("cpu")


def make_custom_spec(**changes: Any) -> dict[str, Any]:
    return {"backend": "custom", "custom": {**ENGINE, **changes}}


def make_run_with(target: TargetFiles, folder: Path, **changes: Any) -> CaptureRun:
    return capture_run(target, folder, **make_custom_spec(**changes))


def count_captured(run: CaptureRun) -> int:
    """Capture the set and return the number of samples that were captured."""
    return capture_features(run, lambda: load_engine(run.target, run.capture, CPU), ROWS).captured


def test_features_are_those_of_the_engine_under_keys_of_its_own(tiny_target, tiny_engine: HFTargetEngine, tmp_path):
    run = make_run_with(tiny_target, tmp_path)
    assert count_captured(run) == len(ROWS)
    assert count_captured(run) == 0
    assert count_captured(make_run_with(tiny_target, tmp_path, engine="yourlab")) == len(ROWS)
    assert count_captured(make_run_with(tiny_target, tmp_path, numerics=3)) == len(ROWS)
    assert count_captured(make_run_with(tiny_target, tmp_path, options={"speed": "high"})) == 0
    row = ROWS[0].input_ids.tolist()
    engine = load_engine(tiny_target, run.capture, CPU)
    taps = [LayerTap(0), LayerTap(2)]
    for name, stream in engine.capture([row], taps)[0].items():
        assert torch.equal(stream, tiny_engine.capture([row], taps)[0][name])


def test_an_engine_may_use_the_memory_of_its_answers_again(tiny_target, tiny_engine: HFTargetEngine, tmp_path):
    run = make_run_with(tiny_target, tmp_path, entry_point="custom_engines:load_reusing")
    run = run.model_copy(update={"capture": run.capture.model_copy(update={"batch_tokens": 1})})
    assert count_captured(run) == len(ROWS)
    store = LocalFeatureStore(run.store.root)
    for row, ref in zip(ROWS, make_refs(run, StreamPlan.of(run), ROWS, store.uri), strict=True):
        stored, handle = store.get(ref)
        expected = tiny_engine.capture([row.input_ids.tolist()], [LayerTap(2), LayerTap(4)])[0]
        assert all(torch.equal(stored[name], stream) for name, stream in expected.items())
        store.release(handle)


def test_name_and_numerics_are_part_of_every_identity(tiny_target, tmp_path):
    capture = CaptureSpec(**make_custom_spec(), compute_dtype="float32")
    assert make_engine_identity(capture) == EngineIdentity("custom:mylab-float32", 2)
    assert capture.to_identity() == {"backend": "custom:mylab/2", "dtype": "bfloat16", "compute_dtype": "float32"}
    run = RegenerateRun(
        out=tmp_path, target=tiny_target, conversations=tmp_path, answers=tmp_path, responses=ResponseSpec(),
        max_length=32, capture=capture,
    )  # fmt: skip
    assert make_answers_identity(run)["engine"] == "custom:mylab-float32"


def test_identities_of_the_engines_of_this_package_stay_what_they_were():
    for backend, engine in (("hf", "hf-bfloat16"), ("sglang_server", "sglang-bfloat16")):
        capture = CaptureSpec(backend=backend)
        assert make_engine_identity(capture) == EngineIdentity(engine, 1)
        assert capture.to_identity() == {"backend": backend, "dtype": "bfloat16", "compute_dtype": "bfloat16"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_as_promised_stops_the_run_and_nothing_is_stored(tiny_target, tmp_path, damage: str):
    run = make_run_with(tiny_target, tmp_path, options={"damage": damage})
    method, _ = DAMAGES[damage]
    with pytest.raises(
        EngineError, match=f"engine of custom_engines:load breaks the contract of .*TargetEngine: {method}"
    ):
        count_captured(run)
    store = open_store(run.store)
    assert list(run.store.root.glob("shards/*")) == []
    store.close()


def test_features_that_the_head_does_not_turn_into_the_logits_are_refused(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setitem(
        DAMAGES, "before the norm", ("capture", lambda rows: [{**r, "last": r["last"] * 2} for r in rows])
    )
    run = make_run_with(tiny_target, tmp_path, options={"damage": "before the norm"})
    with pytest.raises(CaptureError, match="the target's head on it differs from the target's logits"):
        count_captured(run)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Generated((1, 2, 3), True), "expected at most 2 tokens, found 3"),
        (Generated((1, 4000), True), r"expected ids 0..2047, found 4000"),
        ((1, 2), "expected Generated, found a tuple"),
    ],
)
def test_answers_are_looked_at_too(tiny_target, tiny_engine, monkeypatch, answer, message):
    monkeypatch.setattr(tiny_engine, "generate", lambda *args: [answer])
    engine = CheckedEngine(tiny_engine, tiny_engine.identity, tiny_target, torch.float32, "lab:load")
    with pytest.raises(EngineError, match=f"engine of lab:load .*generate: {message}"):
        engine.generate([[5, 6]], ResponseSpec(max_new_tokens=2), ["a"], 100)


def test_it_is_asked_as_much_at_a_time_as_it_says(tiny_target, tiny_engine, monkeypatch):
    monkeypatch.setattr(tiny_engine, "concurrent", True)
    monkeypatch.setattr(tiny_engine, "replicas", 3)
    engine = CheckedEngine(tiny_engine, tiny_engine.identity, tiny_target, torch.float32, "lab:load")
    assert (engine.concurrent, engine.replicas) == (True, 3)


@pytest.mark.parametrize(
    ("entry_point", "message"),
    [
        ("custom_engine:load", "there is no module custom_engine. Install its package"),
        ("custom_engines.more:load", "there is no module custom_engines.more"),
        ("custom_engines:laod", r"module custom_engines has no laod; did you mean load\?"),
        ("custom_engines:DAMAGES", "module custom_engines has no callable DAMAGES"),
        ("custom_engines:load_nothing", "expected it to return a .*TargetEngine, found a str"),
    ],
)
def test_a_wrong_entry_point_is_told_with_what_it_may_have_meant(tiny_target, entry_point: str, message: str):
    capture = CaptureSpec(**make_custom_spec(entry_point=entry_point), device="cpu")
    with pytest.raises(ConfigError, match=message):
        load_engine(tiny_target, capture, CPU)


def test_what_the_module_itself_fails_to_import_is_not_taken_for_its_absence(tiny_target, tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import a_library_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    capture = CaptureSpec(**make_custom_spec(entry_point="half_installed:load"), device="cpu")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
        load_engine(tiny_target, capture, CPU)


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ({"backend": "custom"}, "capture: backend custom needs the key custom, with entry_point and engine"),
        ({"backend": "hf", "custom": ENGINE}, "the key custom is for backend custom, found backend hf"),
        (
            make_custom_spec(entry_point="mylab.engine"),
            "capture.custom.entry_point: expected text like mylab.engine:load, found 'mylab.engine'",
        ),
        (make_custom_spec(engine="My Lab"), "capture.custom.engine: expected text like mylab-v2, found 'My Lab'"),
        (make_custom_spec(numeric=2), r"unknown key capture.custom.numeric; did you mean numerics\?"),
        ({"backend": "custm"}, r"capture.backend: .*found 'custm'; did you mean custom\?"),
        ({"backend": "custom", "custom": {"engine": "x"}}, "key capture.custom.entry_point is missing"),
        (
            {"backend": "sglang", "server": {"url": "http://127.0.0.1:1", "spool": "/x"}},
            "server.url, urls, spool and replicas are for backend sglang_server",
        ),
    ],
)
def test_a_wrong_entry_in_the_registry_is_told(capture: dict[str, Any], message: str):
    entry = {"name": "mine", "model": "m", "dataset": "d", "capture": capture}
    with pytest.raises(ConfigError, match=message):
        parse_spec(TargetSpec, entry, where="mine.yaml")
