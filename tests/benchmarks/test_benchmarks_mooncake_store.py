"""Shares of the raw calls' speed, computed round by round."""

from __future__ import annotations

import mooncake_store
import pytest
import torch
from mooncake_store import Side, measure


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_shares_are_medians_of_quotients_and_all_sides_run_in_every_round(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(mooncake_store.time, "perf_counter", clock)
    freed: list[str] = []

    def build(name: str, put_s: float, get_s: float) -> Side:
        return Side(
            name,
            lambda index, _: clock.work(put_s * (1 + index)),  # each round is slower than the one before
            lambda index, _: clock.work(get_s * (1 + index)),
            lambda _: freed.append(name),
        )

    figures = measure([build("raw", 1.0, 2.0), build("ours", 1.25, 4.0)], torch.zeros(250_000), rounds=5)
    assert figures["raw"] == {"put_mb_per_s": 0, "get_mb_per_s": 0, "put_share_of_raw": 1.0, "get_share_of_raw": 1.0}
    assert (figures["ours"]["put_share_of_raw"], figures["ours"]["get_share_of_raw"]) == (0.8, 0.5)
    assert sorted(freed) == ["ours"] * 7 + ["raw"] * 7
