"""The platform plug-in for SGLang on a CPU: those parts that need only torch, outside SGLang's environment."""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

PLUGIN = Path(__file__).resolve().parents[2] / "tools" / "sglang_cpu_platform" / "draftworks_sglang_cpu"


def load(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"plugin_{name}", PLUGIN / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    return load("speculation")


def test_one_copy_of_a_target_is_forked_and_several_are_left_to_sglang(monkeypatch):
    chosen = []
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda method, force: chosen.append((method, force)))
    plugin = load("one_import")
    plugin.choose_fork(None, SimpleNamespace(dp_size=2))
    assert chosen == []
    plugin.choose_fork(None, SimpleNamespace(dp_size=1))
    assert chosen == [("fork", True)]


def test_a_program_that_is_no_server_is_left_alone():
    """SGLang is not installed here: an import of it would fail."""
    load("one_import").register()


def test_cache_locations_are_the_named_span_of_each_requests_row(plugin):
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    found = plugin.cache_locations(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=table,
        start_offset=torch.tensor([3, 1]),
        end_offset=torch.tensor([6, 3]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert found.tolist() == [23, 24, 25, 1, 2]
    assert found.dtype == torch.int64


def test_a_streamless_tensor_takes_no_notice_of_streams_and_makes_plain_ones(plugin):
    lengths = torch.tensor([3, 5])
    with pytest.raises(RuntimeError):
        lengths.record_stream(torch.cpu.current_stream())
    streamless = lengths.as_subclass(plugin.Streamless)
    streamless.record_stream(torch.cpu.current_stream())
    assert type(streamless + 1) is torch.Tensor
    assert (streamless + 1).tolist() == [4, 6]


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)

    def forward(self, positions: torch.Tensor, *, states: torch.Tensor) -> torch.Tensor:
        assert positions.dtype == torch.int64
        return self.linear(states)


def test_a_draft_computes_in_its_own_dtype_whatever_it_is_handed(plugin):
    draft = nn.Module()
    draft.layers = nn.ModuleList([Doubling()])
    states = torch.randn(3, 2)
    plugin.keep_own_dtype(draft)
    found = draft.layers[0](torch.arange(3), states=states.bfloat16())
    assert found.dtype == torch.float32
    assert torch.equal(found, draft.layers[0].linear(states.bfloat16().float()))
