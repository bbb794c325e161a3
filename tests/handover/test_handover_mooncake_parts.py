"""Parts through a real Mooncake: what the hook puts, the reader gets, once; nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mooncake_harness import is_object
from mooncake_toys import running_mooncake
from waiting import HANG_S

from draftworks.errors import PassingTroubleError
from draftworks.handover.background import start_hand_over
from draftworks.handover.destination import make_destination
from draftworks.handover.mooncake_parts import MooncakeSink, MooncakeSource
from draftworks.handover.spool import AnsweredRequest, Part, make_request_id
from draftworks.mooncake.address import MooncakeAddress
from draftworks.mooncake.client import MooncakeClient

pytestmark = pytest.mark.mooncake


@pytest.fixture(scope="module")
def address_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with running_mooncake(tmp_path_factory.mktemp("mooncake")) as service:
        yield service.address_file


@pytest.fixture(scope="module")
def sink(address_file: Path) -> MooncakeSink:
    return MooncakeSink(address_file)


@pytest.fixture(scope="module")
def source(address_file: Path) -> MooncakeSource:
    return MooncakeSource(address_file)


def random_part(start: int = 0, dtype: torch.dtype = torch.bfloat16, positions: int = 50) -> Part:
    generator = torch.Generator().manual_seed(start)
    taps = torch.randn(3, positions, 16, generator=generator).to(dtype)
    return Part(start, torch.arange(positions), taps, taps[0].clone(), torch.randn(9, generator=generator))


def list_entries(address_file: Path) -> set[str]:
    client = MooncakeClient(MooncakeAddress.read(address_file))
    keys = client.list_keys(client.read_owner().metrics)
    return {key.split("/")[1] for key in keys if is_object(key)}


def test_parts_are_taken_as_put_and_leave_nothing(sink, source, address_file):
    written = {make_request_id(): random_part(start) for start in (0, 13)}
    for request_id, part in written.items():
        sink.write(request_id, part)
    requests = [AnsweredRequest(request_id, part.start) for request_id, part in written.items()]
    for taken, part in zip(source.take(requests, timeout_s=HANG_S), written.values(), strict=True):
        assert [each.start for each in taken] == [part.start]
        found = taken[0].list_tensors()
        assert all(torch.equal(found[name], tensor) for name, tensor in part.list_tensors().items())
        assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1  # one buffer, no copies
    source.discard(written)
    assert list_entries(address_file) == set()


def test_parts_are_put_into_mooncake_in_the_background(source, address_file):
    hand_over = start_hand_over(make_destination(address_file.parent, address_file))
    requests = [AnsweredRequest(make_request_id()) for _ in range(8)]
    putting = threading.Thread(target=lambda: [hand_over.put(each.request_id, random_part()) for each in requests])
    putting.start()
    assert [len(parts) for parts in source.take(requests, timeout_s=HANG_S)] == [1] * 8
    putting.join()
    assert list_entries(address_file) == set()


def test_a_failure_reaches_the_reader_and_a_part_that_does_not_come_is_told(sink, source, address_file):
    failed, never = make_request_id(), make_request_id()
    sink.fail(failed, "the store is on fire")
    with pytest.raises(PassingTroubleError, match="could not write hidden states: the store is on fire"):
        source.take([AnsweredRequest(failed)], timeout_s=HANG_S)
    with pytest.raises(PassingTroubleError, match=r"not come for 0.2 s"):
        source.take([AnsweredRequest(never)], timeout_s=0.2)
    assert list_entries(address_file) == set()


def test_what_nobody_takes_is_removed(sink, source, address_file):
    given_up, abandoned = make_request_id(), make_request_id()
    for request_id in (given_up, abandoned):
        sink.write(request_id, random_part())
    source.discard([given_up])
    assert list_entries(address_file) == {f"{abandoned}.0"}
    source.sweep(older_than_s=60)
    assert list_entries(address_file) == {f"{abandoned}.0"}
    source.sweep(older_than_s=0)
    assert list_entries(address_file) == set()
