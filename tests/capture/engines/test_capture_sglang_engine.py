"""The SGLang engine against a stand-in with recorded answers: requests, checks and retries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_sglang import HIDDEN, VOCAB, FakeSGLang, RevivedHost, fake_sglang, part_of
from waiting import HANG_S, wait_until

from draftworks.capture.engine import make_engine_identity
from draftworks.capture.engines.parts_engine import require_whole_part
from draftworks.capture.engines.sglang_engine import LOSSES, SGLangEngine, build_sampling_parameters
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, EngineError, PassingTroubleError, UnsoundEngineError
from draftworks.features.contracts import CaptureConfig
from draftworks.handover.spool import Part, write_failure
from draftworks.sglang.client import SGLangClient
from draftworks.storage.identity import LayerTap

TARGET = TargetFiles(
    name="toy", model="models/toy", tokenizer="models/toy", digest="0" * 16, tokenizer_digest="1" * 16,
    num_layers=6, hidden_size=HIDDEN, vocab_size=VOCAB, context=32,
)  # fmt: skip
EXPECTED = CaptureConfig((2, 4), HIDDEN, "float32")
ROWS = [[7, 3, 9], [4], [5, 6, 7, 8]]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSGLang]:
    with fake_sglang(tmp_path / "spool") as fake:
        yield fake


def make_engine(fake: FakeSGLang, attempts: int = 3, timeout_s: float = HANG_S) -> SGLangEngine:
    identity = make_engine_identity(CaptureSpec(backend="sglang_server", compute_dtype="float32"))
    return SGLangEngine(TARGET, identity, RevivedHost(fake, timeout_s), lambda: torch.eye(HIDDEN), attempts=attempts)


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftworks.capture.engines.parts_engine._LONGEST_WAIT_S", 0.0)


def test_streams_are_cut_out_of_what_the_server_captures(fake):
    streams = make_engine(fake).capture(ROWS, [LayerTap(4), LayerTap(2)])
    assert list(streams[0]) == ["hf4", "hf2", "last"]
    for row, found in zip(ROWS, streams, strict=True):
        ids = torch.tensor(row, dtype=torch.float32)[:, None].expand(-1, HIDDEN)
        assert torch.equal(found["hf2"], ids + 200)
        assert torch.equal(found["hf4"], ids + 400)
        assert torch.equal(found["last"], ids)
    assert list(fake.spool.iterdir()) == []


def test_one_token_is_asked_for_and_every_request_has_an_id_of_its_own(fake):
    engine = make_engine(fake)
    engine.capture(ROWS, [])
    engine.capture(ROWS, [])
    ids = [request_id for body in fake.asked for request_id in body["rid"]]
    assert len(set(ids)) == 2 * len(ROWS)
    assert {each["max_new_tokens"] for body in fake.asked for each in body["sampling_params"]} == {1}


def test_what_cannot_be_right_is_never_sent(fake):
    engine = make_engine(fake)
    with pytest.raises(CaptureError, match=r"sequence 1 has 33 tokens, expected 1 to 32"):
        engine.capture([[1], [1] * 33], [])
    with pytest.raises(CaptureError, match=r"token ids 3..50, expected 0..49"):  # it would end the server
        engine.capture([[3, 50]], [])
    with pytest.raises(CaptureError, match=r"layer taps \[6\] are outside the target"):
        engine.capture([[1]], [LayerTap(6)])
    with pytest.raises(CaptureError, match=r"tap hf3 is not among those that the server captures: hf2, hf4"):
        engine.capture([[1]], [LayerTap(3)])
    assert fake.asked == []


@pytest.mark.parametrize("failure", [500, 0], ids=["server error", "connection lost"])
def test_a_failing_batch_is_tried_again_after_a_revival(fake, failure):
    fake.failures = [failure, failure]
    engine = make_engine(fake)
    assert len(engine.capture(ROWS, [])) == len(ROWS)
    assert engine._host.revivals == 2


def test_threads_that_fail_together_revive_the_server_once(fake):
    engine = make_engine(fake)
    fake.failures = [500] * 4
    fake.meeting = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda row: engine.capture([row], []), [[1], [2], [3], [4]]))
    assert [each[0]["last"][0, 0].item() for each in answers] == [1, 2, 3, 4]
    assert engine._host.revivals == 1


def test_submitted_batches_are_with_the_server_at_the_same_time(fake):
    fake.meeting = threading.Barrier(8)
    engine = make_engine(fake)
    answers = [engine.submit([[number]], [LayerTap(2)]) for number in range(1, 9)]
    assert [each.result()[0]["last"][0, 0].item() for each in answers] == list(range(1, 9))


def test_when_a_revival_fails_all_batches_end_with_its_error(fake):
    class DeadHost(RevivedHost):
        def revive(self, error: Exception) -> None:
            super().revive(error)
            raise EngineError("the first cause")

    engine = make_engine(fake)
    engine._host = DeadHost(fake)
    fake.failures, fake.meeting = [500] * 8, threading.Barrier(4)
    for answer in [engine.submit([[number]], []) for number in range(1, 5)]:
        with pytest.raises(EngineError, match="the first cause"):
            answer.result()
    assert engine._host.revivals == 1


def test_what_was_cancelled_is_not_tried_again(fake):
    engine = make_engine(fake)
    fake.failures = [500]
    fake.gate.clear()
    answer = engine.submit([[1]], [])
    wait_until(lambda: fake.asked, "a request")
    engine.cancel([answer])
    fake.gate.set()
    with pytest.raises(EngineError, match="out of memory"):
        answer.result()
    assert len(fake.asked) == 1
    assert engine.submit([[1]], []).result()


def test_a_closed_engine_is_not_revived(fake):
    engine = make_engine(fake)
    fake.failures = [500]
    engine.close()
    with pytest.raises(EngineError, match="its client was closed"):
        engine.capture([[1]], [])
    assert engine._host.revivals == 0


def test_after_the_last_attempt_the_error_is_told_and_the_spool_is_clean(fake):
    fake.failures = [500, 500, 500]
    engine = make_engine(fake)
    with pytest.raises(EngineError, match=r"(?s)SGLang at http://127.*failed on /generate .500.*out of memory"):
        engine.capture(ROWS, [])
    assert engine._host.revivals == 2
    assert list(fake.spool.iterdir()) == []


def test_a_refused_request_is_not_tried_again(fake):
    fake.refused = 4
    engine = make_engine(fake)
    with pytest.raises(CaptureError, match=r"refused /generate \(400\): .*longer than the model's context"):
        engine.capture(ROWS, [])
    assert len(fake.asked) == 1
    assert engine._host.revivals == 0


def test_a_server_that_does_not_answer_in_time_is_told(fake):
    fake.gate.clear()
    with pytest.raises(EngineError, match=r"/generate: no answer within 0.2 s \(sglang.request_timeout_s"):
        make_engine(fake, attempts=1, timeout_s=0.2).capture(ROWS, [])
    fake.gate.set()


def test_a_server_that_is_not_there_is_told():
    with pytest.raises(EngineError, match=r"SGLang at http://127.0.0.1:9: /server_info: cannot be reached"):
        SGLangClient("http://127.0.0.1:9", 1).get_info()


def test_rows_from_a_cache_in_chunks_or_of_other_tokens_are_refused():
    row = [1, 2, 3, 4]
    assert require_whole_part([part_of(row)], row, 0, EXPECTED, "SGLang", LOSSES).start == 0
    with pytest.raises(PassingTroubleError, match="wrote no hidden states for a sequence of 4 tokens"):
        require_whole_part([], row, 0, EXPECTED, "SGLang", LOSSES)
    with pytest.raises(
        CaptureError, match="took 3 of a sequence's 4 tokens from its prefix cache.*--disable-radix-cache"
    ):
        require_whole_part([part_of(row[3:], start=3)], row, 3, EXPECTED, "SGLang", LOSSES)
    with pytest.raises(CaptureError, match="took 3 of a sequence's"):
        require_whole_part([part_of(row)], row, 3, EXPECTED, "SGLang", LOSSES)
    with pytest.raises(CaptureError, match=r"in chunks of \[2, 2\].*--chunked-prefill-size -1"):
        require_whole_part([part_of(row[:2]), part_of(row[2:], start=2)], row, 0, EXPECTED, "SGLang", LOSSES)
    with pytest.raises(CaptureError, match=r"in chunks of \[2\]"):
        require_whole_part([part_of(row[:2])], row, 0, EXPECTED, "SGLang", LOSSES)
    with pytest.raises(CaptureError, match="computed other token ids"):
        require_whole_part([part_of(row[::-1])], row, 0, EXPECTED, "SGLang", LOSSES)
    with pytest.raises(CaptureError, match=r"of 4 positions, found 3 \(taps\) and 4 \(last\)"):
        require_whole_part([replace(part_of(row), taps=torch.zeros(2, 3, HIDDEN))], row, 0, EXPECTED, "SGLang", LOSSES)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda part: {"taps": torch.cat([part.taps, part.last[None]])},
            "taps with 3 x 8 columns in float32, expected 2 x 8",
        ),
        (
            lambda part: {"taps": part.taps.half()},
            r"taps with 2 x 8 columns in float16, expected 2 x 8 in float32 \(hf2, hf4, last",
        ),
        (lambda part: {"last": part.last.double()}, "last with 1 x 8 columns in float64, expected 1 x 8 in float32"),
        (lambda part: {"last": part.last[:, :4]}, "last with 1 x 4 columns"),
    ],
    ids=["3H for 2H", "float16", "float64", "narrow"],
)
def test_another_width_or_dtype_is_refused_and_not_asked_for_again(fake, damage, message):
    fake.damage = lambda part: replace(part, **damage(part))
    with pytest.raises(UnsoundEngineError, match=message):
        make_engine(fake).capture(ROWS, [LayerTap(2)])
    assert len(fake.asked) == 1


def test_engines_have_keys_of_their_own():
    identities = {make_engine_identity(CaptureSpec(backend=name)) for name in ("hf", "sglang_server")}
    assert len(identities) == 2


def test_sampling_options_have_sglangs_names():
    sampling = ResponseSpec(max_new_tokens=9, temperature=0.5, top_p=0.9, top_k=7, repetition_penalty=1.2)
    parameters = build_sampling_parameters(sampling, "0/a", room=5, end_ids={9, 3})
    seed = parameters.pop("sampling_seed")
    assert parameters == {
        "max_new_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.2,
        "stop_token_ids": [3, 9],
    }  # fmt: skip
    assert build_sampling_parameters(sampling, "0/a", 5, ())["sampling_seed"] == seed
    assert build_sampling_parameters(sampling, "1/a", 5, ())["sampling_seed"] != seed
    assert build_sampling_parameters(ResponseSpec(), "0/a", 5, ())["top_k"] == -1
    assert "sampling_seed" not in build_sampling_parameters(ResponseSpec(), "0/a", 5, ())


def test_a_request_that_the_server_gave_up_is_tried_again(fake):
    fake.aborted = 1
    engine = make_engine(fake)
    assert len(engine.generate([[1, 2]], ResponseSpec(), ["a"], 20)[0].ids) == 1
    assert engine._host.revivals == 0


@pytest.mark.parametrize("trouble", ["429", "a full disk", "no file"])
def test_trouble_that_passes_is_waited_for_and_restarts_nothing(fake, trouble: str):
    if trouble == "429":
        fake.failures = [429] * 4
    elif trouble == "no file":
        fake.unwritten = 4
    else:
        fake.damage = _disk_that_is_full(fake, times=4)
    engine = make_engine(fake, attempts=1)
    assert len(engine.capture(ROWS, [LayerTap(2)])) == 3
    assert engine._host.revivals == 0
    assert list(fake.spool.iterdir()) == []


def test_trouble_that_does_not_pass_ends_the_run_and_blames_no_sample(fake):
    fake.unwritten = 99
    with pytest.raises(
        PassingTroubleError, match=r"wrote no hidden states for a sequence of 3 tokens.*Check that the hook is loaded"
    ):
        make_engine(fake, attempts=1).capture(ROWS, [])


def test_a_request_that_is_given_up_every_time_is_its_samples_fault(fake):
    fake.fatal = 4
    engine = make_engine(fake)
    with pytest.raises(CaptureError, match=r"aborted a request: out of memory \(3 times\)"):
        engine.capture(ROWS, [])
    assert engine._host.revivals == 0


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], "expected a list of 3 answers, found 0"),
        ({"text": "hello"}, "expected a list of 3 answers, found .*hello"),
        ([{"text": "hello"}] * 3, r"answer to /generate has an unexpected form \(KeyError: 'meta_info'\): .*hello"),
        (["hello"] * 3, "has an unexpected form"),
        ([{"meta_info": {"finish_reason": None}}] * 3, "has an unexpected form"),
    ],
    ids=["none", "an object", "without meta", "text", "without reason"],
)
def test_an_answer_of_another_form_is_one_clear_error(fake, answers, message):
    fake.answers = answers
    with pytest.raises(EngineError, match=message):
        make_engine(fake, attempts=1).capture(ROWS, [])


def _disk_that_is_full(fake: FakeSGLang, times: int) -> Callable[[Part], Part]:
    """The hook writes the failure instead of a part."""
    left = times

    def damaged(part: Part) -> Part:
        nonlocal left
        if left:
            left -= 1
            write_failure(fake.spool, fake.asked[-1]["rid"][0], "OSError: [Errno 28] No space left on device")
        return part

    return damaged


def test_prompts_without_room_are_not_asked(fake):
    prompts = [[1] * 32, [1, 2], [1] * 40]
    answers = make_engine(fake).generate(prompts, ResponseSpec(max_new_tokens=50), ["a", "b", "c"], max_total=99)
    assert [answer.ids for answer in answers] == [(), (297,), ()]
    assert [answer.finished for answer in answers] == [False, False, False]
    (body,) = fake.asked
    assert [each["max_new_tokens"] for each in body["sampling_params"]] == [30]
