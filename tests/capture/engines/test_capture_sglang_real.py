"""Real SGLang: features and answers equal transformers', a server that died is started again, and no process is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from capture_toys import capture_run, changed_copy, random_rows
from processes import ending, kill_all, wait_until_ended
from sglang_toys import CPU, SGLANG, random_qwen3, sglang_engine, taps_of
from torch import Tensor
from waiting import HANG_S, wait_until

from draftworks.capture.engine import TargetEngine
from draftworks.capture.engines.hf import HFTargetEngine, load_hf_engine
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.capture.probe.probe import EngineProbe
from draftworks.capture.session import capture_features
from draftworks.capture.verify import check_head
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Turn
from draftworks.data.tokenized import write_tokens
from draftworks.errors import EngineError, UnsoundEngineError
from draftworks.sglang.client import SGLangClient
from draftworks.storage.identity import LayerTap

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

TOLERANCE = 2e-5
"""As a share of the largest absolute value of a stream."""
ROWS = [row.input_ids.tolist() for row in random_rows(9, seed=3, longest=100)]


@pytest.fixture
def llama(tiny_sglang: SGLangEngine) -> SGLangEngine:
    return tiny_sglang


@pytest.fixture(scope="module")
def qwen3_target(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TargetFiles:
    return random_qwen3(tmp_path_factory.mktemp("models") / "qwen3", tiny_folder)


@pytest.fixture(scope="module")
def qwen3(qwen3_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    engine = sglang_engine(qwen3_target, tmp_path_factory.mktemp("sglang") / "qwen3", taps_of(qwen3_target), tp_size=2)
    yield engine
    engine.close()


def assert_same_features(engine: TargetEngine, reference: HFTargetEngine, taps: tuple[LayerTap, ...]) -> None:
    for row, found in zip(ROWS, engine.capture(ROWS, taps), strict=True):
        expected = reference.capture([row], taps)[0]
        assert found.keys() == expected.keys()
        for name, stream in expected.items():
            assert found[name].shape == stream.shape
            assert found[name].dtype == stream.dtype
            assert measure_relative_difference(found[name], stream) <= TOLERANCE, name


def measure_relative_difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_llama_features_equal_those_of_transformers_at_every_tap(llama, tiny_engine, tiny_target):
    assert_same_features(llama, tiny_engine, taps_of(tiny_target))


def test_taps_are_told_apart_in_any_order(llama, tiny_engine):
    assert_same_features(llama, tiny_engine, (LayerTap(6), LayerTap(2)))


def test_head_on_last_gives_the_logits_of_the_server(llama):
    check_head(
        llama, [str(index) for index in range(len(ROWS))], ROWS, [each["last"] for each in llama.capture(ROWS, [])]
    )


def test_a_sample_as_long_as_the_context_is_captured(llama, tiny_target):
    row = [5 + index % 2000 for index in range(tiny_target.context)]
    assert len(llama.capture([row], [])[0]["last"]) == tiny_target.context


def test_greedy_answers_equal_those_of_transformers(llama, tiny_engine, tiny_target):
    chat = ChatTokenizer.load(tiny_target)
    prompts = [chat.encode_prompt([Turn("user", f"What does {name} do?")]) for name in ("zip", "os.path.join", "repr")]
    ids = [str(index) for index in range(len(prompts))]
    for limit in (7, 120):
        sampling = ResponseSpec(max_new_tokens=limit)
        expected = tiny_engine.generate(prompts, sampling, ids, 200, end_ids=chat.eos_ids)
        assert llama.generate(prompts, sampling, ids, 200, end_ids=chat.eos_ids) == expected
    assert any(each.finished for each in expected)


def test_end_ids_end_an_answer_and_are_part_of_it(llama, tiny_engine):
    prompt = ROWS[0]
    long = llama.generate([prompt], ResponseSpec(max_new_tokens=6), ["a"], 200)[0].ids
    end = long[2]
    answer = llama.generate([prompt], ResponseSpec(max_new_tokens=6), ["a"], 200, end_ids=[end])[0]
    assert (answer.ids, answer.finished) == (long[: long.index(end) + 1], True)


def test_features_of_two_engines_agree_and_their_keys_do_not(llama, tiny_target, tiny_engine, tmp_path):
    rows = random_rows(5)
    by_sglang = capture_run(tiny_target, tmp_path, backend="sglang_server")
    by_hf = by_sglang.model_copy(
        update={"capture": CaptureSpec(compute_dtype="float32", dtype="float32", device="cpu")}
    )
    first = capture_features(by_sglang, lambda: llama, rows)
    second = capture_features(by_hf, lambda: tiny_engine, rows)
    assert first.captured == second.captured == len(rows)
    assert capture_features(by_sglang, lambda: pytest.fail("all of it is there"), rows).captured == 0


def test_a_server_of_somebody_else_serves_as_well(llama, tiny_target, tiny_engine, tmp_path):
    url, spool = llama.url, str(llama.spool)
    external = sglang_engine(tiny_target, tmp_path, (LayerTap(2), LayerTap(4)), url=url, spool=spool)
    assert_same_features(external, tiny_engine, (LayerTap(2), LayerTap(4)))
    external.close()
    assert llama.capture(ROWS[:1], [])


def test_a_server_with_other_weights_under_the_same_name_is_refused(llama, tiny_target, qwen3_target, tmp_path):
    other = random_qwen3(tmp_path / "other", Path(tiny_target.model))
    posing = tiny_target.model_copy(update={"model": other.model})
    place = {"url": llama.url, "spool": str(llama.spool)}
    with pytest.raises(EngineError, match=rf"serves the model {tiny_target.model}, expected {other.model}"):
        sglang_engine(posing, tmp_path, (LayerTap(2),), **place)
    shuffled = tmp_path / "shuffled"
    reference = load_hf_engine(tiny_target, CaptureSpec(compute_dtype="float32"), CPU).model
    with torch.no_grad():
        reference.get_output_embeddings().weight.copy_(reference.get_output_embeddings().weight.roll(1, 0))
    reference.save_pretrained(shuffled)
    posing = tiny_target.model_copy(update={"model": str(shuffled)})
    with pytest.raises(EngineError, match="the target's head on it differs from the target's logits"):
        sglang_engine(posing, tmp_path, (LayerTap(2),), model=tiny_target.model, **place)


def test_a_server_with_another_tokenizer_is_refused(llama, tiny_target, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((Path(tiny_target.tokenizer) / name).read_bytes())
    text = (Path(tiny_target.tokenizer) / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"merges": [', '"merges": [], "unused": [', 1))
    other = tiny_target.model_copy(update={"tokenizer": str(folder)})
    with pytest.raises(EngineError, match="its tokenizer gives"):
        sglang_engine(other, tmp_path, None, url=llama.url, spool=str(llama.spool))


@pytest.mark.long
def test_qwen3_on_two_ranks_equals_transformers(qwen3, qwen3_target):
    reference = load_hf_engine(qwen3_target, CaptureSpec(compute_dtype="float32"), CPU)
    assert_same_features(qwen3, reference, taps_of(qwen3_target))


def load_weights(server: SGLangEngine, model: str) -> None:
    answer = httpx.post(f"{server.url}/update_weights_from_disk", json={"model_path": model}, timeout=HANG_S)
    assert answer.json()["success"], answer.text


def test_a_server_whose_weights_were_replaced_is_refused_until_it_has_its_own(llama, tiny_target, tmp_path: Path):
    probe = EngineProbe(capture_run(tiny_target, tmp_path / "run"), random_rows(5, longest=60))
    assert tuple(probe.compare(llama).differences) == ("hf2", "hf4", "last")
    other = changed_copy(tiny_target, tmp_path / "other", 0.05).model
    load_weights(llama, other)
    try:
        with SGLangClient(llama.url, HANG_S) as client:
            info = client.get_info()
        assert (info.model, info.started_with, info.convention) == (other, tiny_target.model, "eagle3")
        with pytest.raises(UnsoundEngineError, match=r"stream hf4 differs by .* expected at most 0.0005") as raised:
            probe.compare(llama)
        assert "stream hf2" not in str(raised.value)
    finally:
        load_weights(llama, tiny_target.model)
    probe.compare(llama)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.long)])
def test_a_server_that_died_is_started_again(name: str, request: pytest.FixtureRequest):
    """One rank or two."""
    engine = request.getfixturevalue(name)
    before = engine.capture(ROWS[:2], [LayerTap(1)])
    dead = psutil.Process(engine._host.pid)
    kill_all([*dead.children(recursive=True), dead])
    after = engine.capture(ROWS[:2], [LayerTap(1)])
    assert engine._host.pid != dead.pid
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one["hf1"], other["hf1"], atol=1e-5)


@pytest.mark.long
def test_a_cancelled_capture_leaves_no_process(tiny_target, tmp_path):
    run = capture_run(tiny_target, tmp_path, backend="sglang_server").model_copy(update={"sglang": SGLANG})
    run.out.mkdir()
    write_tokens(run.tokens, random_rows(4))
    file = tmp_path / "run.json"
    file.write_text(run.model_dump_json())
    with ending(subprocess.Popen([sys.executable, "-m", "draftworks.programs.capture", str(file)])) as program:
        started = psutil.Process(program.pid)
        wait_until(
            lambda: len(started.children(recursive=True)) >= 3,  # the server, its scheduler, its detokenizer
            "the server's processes",
            possible=lambda: program.poll() is None,
        )
        processes = started.children(recursive=True)
        program.send_signal(signal.SIGTERM)
        assert program.wait() == 128 + signal.SIGTERM
        wait_until_ended(*processes)
