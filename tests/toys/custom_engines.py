"""Engines that a user might write, for the backend `custom`: entry points by their path in this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from capture_toys import WatchedEngine

from draftworks.capture.engine import EnginePlace, TargetEngine
from draftworks.capture.engines.hf import load_hf_engine
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles

Spoil = Callable[[Any], Any]


class SpoiledEngine(WatchedEngine):
    """A sound engine, one of whose methods returns something else."""

    def __init__(self, engine: TargetEngine, method: str, spoil: Spoil) -> None:
        super().__init__(engine)
        sound = getattr(self, method)
        setattr(self, method, lambda *args, **kwargs: spoil(sound(*args, **kwargs)))


DAMAGES: dict[str, tuple[str, Spoil]] = {
    "a stream that is none": ("capture", lambda rows: [{**row, "last": row["last"], "hf2": None} for row in rows]),
    "a stream too few": ("capture", lambda rows: [{"last": row["last"]} for row in rows]),
    "a row too few": ("capture", lambda rows: [{name: stream[1:] for name, stream in row.items()} for row in rows]),
    "another width": ("capture", lambda rows: [{name: stream[:, :9] for name, stream in row.items()} for row in rows]),
    "another dtype": ("capture", lambda rows: [{name: s.half() for name, s in row.items()} for row in rows]),
    "a sample too few": ("capture", lambda rows: rows[1:]),
    "a generator": ("capture", iter),
    "logits of another vocabulary": ("logits", lambda rows: [row[:, :-1] for row in rows]),
    "logits of ids": ("logits", lambda rows: [row.long() for row in rows]),
    "a head of another vocabulary": ("head_logits", lambda logits: logits[:, :-1]),
}
"""By name: the method, and what becomes of what it returns."""


def load(target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None) -> TargetEngine:
    """A sound engine, or one with the damage that the options name."""
    engine = load_hf_engine(target, capture, device)
    damage = capture.custom.options.get("damage") if capture.custom else None
    return SpoiledEngine(engine, *DAMAGES[damage]) if damage else engine


class ReusingEngine(WatchedEngine):
    """An engine that uses the memory of its last answer again."""

    def __init__(self, engine: TargetEngine) -> None:
        super().__init__(engine)
        self._answer: list[torch.Tensor] = []

    def capture(self, sequences, taps):
        with torch.inference_mode():
            for stream in self._answer:
                stream.fill_(7.0)
        captured = super().capture(sequences, taps)
        self._answer = [stream for streams in captured for stream in streams.values()]
        return captured


def load_reusing(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None
) -> TargetEngine:
    return ReusingEngine(load_hf_engine(target, capture, device))


def load_nothing(*arguments: Any) -> str:
    return "an engine"
