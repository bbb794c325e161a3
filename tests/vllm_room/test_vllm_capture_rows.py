"""From vLLM's cache of blocks to a part: every request its own rows, none without its part or its reason, nobody else's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftworks.errors import PassingTroubleError
from draftworks.handover.background import start_hand_over
from draftworks.handover.destination import make_destination
from draftworks.handover.spool import AnsweredRequest, SpoolSource, make_request_id
from draftworks.vllm.capture_rows import CacheReader, FinishedRequest, FinishedRequests, make_part, read_rows

STREAMS, SIZE, WIDTH = 3, 4, 5


def make_cache(blocks: int = 6) -> Tensor:
    """A cache (B, k, S, H) whose values say where they are: 1000 block + 100 stream + position."""
    values = torch.arange(blocks)[:, None, None] * 1000.0 + torch.arange(STREAMS)[:, None] * 100 + torch.arange(SIZE)
    return values[..., None].expand(-1, -1, -1, WIDTH).contiguous()


def make_request(request_id: str, ids: list[int], computed: int | None = None, status: str = "FINISHED_LENGTH_CAPPED"):
    """What is read of vLLM's `Request`."""
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=ids,
        num_computed_tokens=len(ids) if computed is None else computed,
        status=SimpleNamespace(name=status),
    )


def test_rows_come_from_the_requests_own_blocks_in_their_order():
    rows = read_rows(make_cache(), [4, 1, 3], length=6)
    assert rows.shape == (STREAMS, 6, WIDTH)
    assert rows[0, :, 0].tolist() == [4000, 4001, 4002, 4003, 1000, 1001]
    assert rows[2, :, WIDTH - 1].tolist() == [4200, 4201, 4202, 4203, 1200, 1201]
    with pytest.raises(ValueError, match="1 blocks of 4 positions hold no 5 tokens"):
        read_rows(make_cache(), [2], length=5)


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_rows_are_the_same_in_every_layout_of_memory(layout: tuple[int, ...]):
    inverse = [layout.index(axis) for axis in range(4)]
    cache = make_cache().permute(layout).contiguous().permute(inverse)
    assert torch.equal(read_rows(cache, [5, 0], 7), read_rows(make_cache(), [5, 0], 7))


def test_the_last_stream_is_the_state_before_the_final_norm_and_a_cached_prefix_has_no_rows():
    request = FinishedRequest("x", "x", (7, 8, 9), 1, (2,))
    part = make_part(read_rows(make_cache(), request.blocks, 3), request)
    assert (part.start, part.input_ids.tolist()) == (1, [8, 9])
    assert part.taps[:, :, 0].tolist() == [[2001, 2002], [2101, 2102]]
    assert part.last[:, 0].tolist() == [2201, 2202]


def test_a_finished_request_is_announced_first_and_handed_over_at_the_next_step(tmp_path: Path):
    hand_over = start_hand_over(make_destination(tmp_path))
    finished, reader = FinishedRequests(hand_over, group=1), CacheReader(hand_over, make_cache())
    ours = [make_request_id() for _ in range(2)]
    engine_ids = [f"cmpl-{ours[0]}-0-5f2c81aa", f"{ours[1]}-0b7e22c1"]
    finished.note_cached(make_request(engine_ids[1], [1, 2]), 1)
    assert finished.add(make_request(engine_ids[0], [1, 2, 3, 4, 5]), ([9], [2, 0]))
    assert finished.add(make_request(engine_ids[1], [1, 2]), ([9], [3]))
    assert {path.name for path in tmp_path.iterdir()} == {f"{ours[0]}.0.pending", f"{ours[1]}.1.pending"}
    assert reader.hand_over(finished.take()) == set(engine_ids)
    assert finished.take() == ()
    parts = SpoolSource(tmp_path).take([AnsweredRequest(ours[0]), AnsweredRequest(ours[1], 1)], timeout_s=60)
    assert parts[0][0].taps[0, :, 0].tolist() == [2000, 2001, 2002, 2003, 0]
    assert (parts[1][0].start, parts[1][0].input_ids.tolist()) == (1, [2])


@pytest.mark.parametrize(
    ("request_id", "status"),
    [("chatcmpl-9", "FINISHED_STOPPED"), ("draftworks-../../etc", "FINISHED_STOPPED"), (None, "FINISHED_ABORTED")],
)
def test_requests_of_others_and_those_nobody_waits_for_are_left_alone(tmp_path: Path, request_id, status):
    finished = FinishedRequests(start_hand_over(make_destination(tmp_path)), group=0)
    assert not finished.add(make_request(request_id or make_request_id(), [1], status=status), ([0],))
    assert finished.take() == ()
    assert list(tmp_path.iterdir()) == []


def test_what_goes_wrong_is_told_to_whoever_waits_and_not_to_the_engine(tmp_path: Path):
    hand_over = start_hand_over(make_destination(tmp_path))
    finished, reader = FinishedRequests(hand_over, group=0), CacheReader(hand_over, make_cache())
    early, short = make_request_id(), make_request_id()
    assert not finished.add(make_request(early, [1, 2, 3], computed=2), ([0],))
    assert finished.add(make_request(short, [1] * 5), ([0],))
    assert reader.hand_over(finished.take()) == {short}
    for request_id, reason in ((early, "computed 2 of 3 tokens"), (short, "1 blocks of 4 positions")):
        with pytest.raises(PassingTroubleError, match=reason):
            SpoolSource(tmp_path).take([AnsweredRequest(request_id)], timeout_s=60)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_gave_up_before_the_rows_were_copied_finds_nothing_later(tmp_path: Path):
    hand_over = start_hand_over(make_destination(tmp_path))
    finished, reader = FinishedRequests(hand_over, group=0), CacheReader(hand_over, make_cache())
    request_id = make_request_id()
    finished.add(make_request(request_id, [1, 2]), ([0],))
    SpoolSource(tmp_path).discard([request_id])
    reader.hand_over(finished.take())
    hand_over.flush()
    assert list(tmp_path.iterdir()) == []
