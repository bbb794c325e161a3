"""What a target engine offers, whatever it is built on, and how one is found by the name of its backend."""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from draftworks.errors import ConfigError
from draftworks.identity import EngineIdentity, LastHidden, LayerTap
from draftworks.runs import TargetFiles
from draftworks.specs import CaptureSpec, ResponseSpec


@dataclass(frozen=True)
class Generated:
    """One response. `ids` includes the end token if there is one; `finished` is false if it was cut by a limit."""

    ids: tuple[int, ...]
    finished: bool


class TargetEngine(ABC):
    """A loaded target model: captures hidden states and generates responses.

    Attributes:
        backend: name in `KNOWN_BACKENDS`.
        identity: who computes; part of every feature key.
        last_hidden: norm convention of the stream `last`.
    """

    backend: ClassVar[str]
    identity: EngineIdentity
    last_hidden: LastHidden

    @abstractmethod
    def capture(self, token_rows: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> list[dict[str, Tensor]]:
        """Hidden states of every row: by stream name ("hf3", "last"), each (S, H) on CPU in the compute dtype, S the
        row's own length.

        Raises:
            CaptureError: a row is empty, too long or has ids outside the vocabulary; a tap is outside the target.
        """

    @abstractmethod
    def logits(self, token_rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """The target's own logits of every row, (S, V): what capture is verified against."""

    @abstractmethod
    def head_logits(self, last: Tensor) -> Tensor:
        """Logits (S, V) from the stream `last` (S, H), by the target's head alone."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: ResponseSpec,
        sample_ids: Sequence[str],
        max_total: int,
        turn: int = 0,
        end_ids: Collection[int] = (),
    ) -> list[Generated]:
        """Responses to prompts, at most `max_total` tokens with their prompt; see draftworks.capture.generate."""


@dataclass(frozen=True)
class Backend:
    """A way to run targets. `numerics` is raised when its numbers change beyond rounding: old features then no longer count."""

    loader: str
    numerics: int
    last_hidden: LastHidden


KNOWN_BACKENDS: dict[str, Backend] = {
    "hf": Backend("draftworks.capture.hf:load_hf_engine", numerics=1, last_hidden=LastHidden(normed=True)),
}


def find_backend(name: str) -> Backend:
    """The backend of that name; ConfigError with the known ones otherwise."""
    if name not in KNOWN_BACKENDS:
        close = difflib.get_close_matches(name, KNOWN_BACKENDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"unknown capture backend {name!r}: {hint}Known: {', '.join(sorted(KNOWN_BACKENDS))}")
    return KNOWN_BACKENDS[name]


def engine_identity(capture: CaptureSpec) -> EngineIdentity:
    """Identity of the engine that `capture` asks for, without loading it.

    The compute dtype is part of it: states computed in bfloat16 and stored in float32 are not those computed in float32.
    """
    backend = find_backend(capture.backend)
    return EngineIdentity(f"{capture.backend}-{capture.compute_dtype}", backend.numerics)


def load_engine(target: TargetFiles, capture: CaptureSpec, device: torch.device) -> TargetEngine:
    """Load a target with the backend that `capture` names onto `device`, which decides instead of `capture.device`.

    Raises:
        ConfigError: the backend is unknown, or the target is missing, unreadable or no causal language model.
    """
    module, _, attribute = find_backend(capture.backend).loader.partition(":")
    return getattr(importlib.import_module(module), attribute)(target, capture, device)
