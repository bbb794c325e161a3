"""The hook splits a packed batch into requests, writes those of Draftworks only, and never raises into the engine."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from draftworks.errors import PassingTroubleError
from draftworks.sglang.hook import SGLangCaptureBackend, find_spool, format_hook_option
from draftworks.sglang.parts import make_request_id
from draftworks.sglang.spool import SpoolSink, take_parts

LENGTHS = [3, 1, 4]


def pack(request_ids: list[str], starts: list[int], padding: int = 0) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A batch as SGLang packs it, whose values count the positions, and the output of the logits layer."""
    rows = torch.arange(sum(LENGTHS) + padding, dtype=torch.float32)[:, None]
    batch = SimpleNamespace(
        rids=request_ids,
        extend_seq_lens_cpu=LENGTHS,
        extend_prefix_lens_cpu=starts,
        input_ids=torch.arange(sum(LENGTHS) + padding, dtype=torch.int32),
    )
    logits = torch.arange(len(LENGTHS), dtype=torch.float32)[:, None].expand(-1, 5)
    output = SimpleNamespace(
        hidden_states=rows.expand(-1, 4), last_hidden_states=rows.expand(-1, 2), next_token_logits=logits
    )
    return batch, output


def test_every_request_gets_its_own_rows(tmp_path: Path):
    ids = [make_request_id(), make_request_id(with_logits=True), make_request_id()]
    SGLangCaptureBackend(SpoolSink(tmp_path)).write(*pack(ids, [0, 0, 7], padding=2))
    parts = [take_parts(tmp_path, request_id)[0] for request_id in ids]
    assert [part.input_ids.tolist() for part in parts] == [[0, 1, 2], [3], [4, 5, 6, 7]]
    for part in parts:
        assert torch.equal(part.taps, part.input_ids[:, None].float().expand(2, -1, 2))
        assert torch.equal(part.last, part.input_ids[:, None].float().expand(-1, 2))
    assert [part.start for part in parts] == [0, 0, 7]
    assert [part.logits is None for part in parts] == [True, False, True]
    assert parts[1].logits.tolist() == [1.0] * 5


def test_requests_of_others_are_left_alone(tmp_path: Path):
    SGLangCaptureBackend(SpoolSink(tmp_path)).write(*pack(["HEALTH_CHECK_1", "answer", "x"], [0, 0, 0]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["hidden_states", "last_hidden_states"])
def test_what_goes_wrong_is_told_to_whoever_waits_and_not_to_the_engine(tmp_path: Path, missing):
    ids = [make_request_id(), "answer", make_request_id()]
    batch, output = pack(ids, [0, 0, 0])
    setattr(output, missing, None)
    SGLangCaptureBackend(SpoolSink(tmp_path)).write(batch, output)
    for request_id in (ids[0], ids[2]):
        with pytest.raises(PassingTroubleError, match="--enable-return-aux-hidden-states"):
            take_parts(tmp_path, request_id)
    assert list(tmp_path.iterdir()) == []


def test_nothing_reaches_the_engine_even_where_nobody_can_be_told(tmp_path: Path, monkeypatch):
    batch, output = pack([make_request_id(), "answer", "x"], [0, 0, 0])
    monkeypatch.setattr("draftworks.sglang.hook._find_prefill", lambda args: batch)
    SGLangCaptureBackend(SpoolSink(tmp_path / "removed"))(nn.Identity(), (), output)
    assert not (tmp_path / "removed").exists()


def test_rows_that_are_missing_are_told(tmp_path: Path):
    ids = [make_request_id() for _ in LENGTHS]
    batch, output = pack(ids, [0, 0, 0])
    output.last_hidden_states = output.last_hidden_states[:5]
    SGLangCaptureBackend(SpoolSink(tmp_path)).write(batch, output)
    with pytest.raises(PassingTroubleError, match="kept hidden states of 5 positions, expected 8"):
        take_parts(tmp_path, ids[0])


@pytest.mark.parametrize(
    "factory", ["draftworks.sglang.hook:capture_hook", "draftworks.serving.sglang_hook:capture_hook"]
)
def test_a_server_that_loaded_the_hook_where_it_is_or_was_is_known(factory: str, tmp_path: Path):
    others = {"hook_factory": "mylab:hook", "config": {"spool": "/elsewhere"}}
    assert find_spool([others, {"hook_factory": factory, "config": {"spool": str(tmp_path)}}]) == tmp_path
    assert find_spool([others]) is None


def test_the_hook_is_on_the_layer_that_makes_logits_in_a_wrapper_too(tmp_path: Path):
    (hook,) = json.loads(format_hook_option(tmp_path))
    modules = ["", "model", "logits_processor", "language_model.logits_processor", "lm_head", "language_model.lm_head"]
    matched = [name for name in modules if any(fnmatch.fnmatch(name, each) for each in hook["target_modules"])]
    assert matched == ["logits_processor", "language_model.logits_processor"]
