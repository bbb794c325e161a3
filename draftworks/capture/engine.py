"""Interface of a target engine, and the table of backends that load one by name."""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.sglang import SGLangSpec
from draftworks.errors import CaptureError, ConfigError
from draftworks.storage.identity import EngineIdentity, LastHidden, LayerTap, digest


def derive_seed(seed: int, key: str) -> int:
    """Return a seed for one request, 0 to 2**31 - 1, derived from the run's seed and the request's `key`."""
    hashed = sha256(f"{seed}/{key}".encode()).digest()
    return int.from_bytes(hashed[:4], "big") >> 1


@dataclass(frozen=True)
class Generated:
    """One generated answer. `ids` includes the end token if there is one; `finished` is False if a limit cut it off."""

    ids: tuple[int, ...]
    finished: bool


class TargetEngine(ABC):
    """A loaded target model: captures hidden states and generates responses.

    Attributes:
        backend: name in `KNOWN_BACKENDS`.
        identity: who computes; part of every feature key.
        last_hidden: norm convention of the stream `last`.
        concurrent: whether `generate` may be called from several threads, and answers more in the same time if it is.
        tried: whether we know this version of what it is built on; else nothing is taken from it that was not compared.
        replicas: copies of the target that answer side by side.
    """

    backend: ClassVar[str]
    concurrent: bool = False
    tried: bool = True
    replicas: int = 1
    identity: EngineIdentity
    last_hidden: LastHidden

    @property
    def where(self) -> str:
        """What it is called in messages."""
        return f"the engine of backend {self.backend}"

    def members(self) -> Sequence[TargetEngine]:
        """Return the engines that share the work, each of which can be called by itself."""
        return (self,)

    @abstractmethod
    def capture(self, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> list[dict[str, Tensor]]:
        """Hidden states of every row: by stream name ("hf3", "last"), each (S, H) on CPU in the compute dtype, S the
        row's own length.

        Raises:
            CaptureError: a row is empty, too long or has ids outside the vocabulary; a tap is outside the target.
        """

    @abstractmethod
    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """The target's own logits at the end of every row, (R, V) on CPU: what capture is verified against.

        R is at least 1 and at most S, as many as the engine can give at no great cost.
        """

    @abstractmethod
    def head_logits(self, last: Tensor) -> Tensor:
        """Logits (R, V), on CPU, from rows (R, H) of the stream `last`, by the target's head alone."""

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
        """Responses to prompts, at most `max_total` tokens with their prompt; see draftworks.capture.engines.generate."""

    def close(self) -> None:  # noqa: B027 - an engine inside this process has nothing to close
        """End what the engine runs outside this process."""


@dataclass(frozen=True)
class EnginePlace:
    """Surroundings of an engine, for those that need more than a target and a device.

    Attributes:
        folder: on the disk of this machine, the engine's own, and created by it.
        taps: everything that will be captured, beside `last`; None = nothing, the engine only generates.
        head: the target's output matrix (V, H), read when it is needed.
        embedding: the target's input matrix (V, H), likewise.
        local_rank: of this process among those of this machine, each of which has an engine.
        longest: tokens of the longest sequence that will be asked for; 0 if that is not known.
    """

    folder: Path
    taps: tuple[LayerTap, ...] | None = None
    head: Callable[[], Tensor] | None = None
    embedding: Callable[[], Tensor] | None = None
    sglang: SGLangSpec = field(default_factory=SGLangSpec)
    local_rank: int = 0
    longest: int = 0


@dataclass(frozen=True)
class Backend:
    """A way to run targets.

    Attributes:
        loader: called as `load_engine` is.
        engine: who computes, for identities.
        numerics: raised when its numbers change beyond rounding: old features then no longer count.
        repeatable: whether the same batch gives the same bits again, in another process on the same machine. Only then
            is a capture that goes on worth the batches that it began with.
    """

    loader: str
    engine: str
    numerics: int
    last_hidden: LastHidden
    repeatable: bool = False


_SGLANG = Backend(
    "draftworks.capture.engines.sglang_loading:load_sglang_engine",
    "sglang",
    numerics=1,
    last_hidden=LastHidden(normed=True),
)
KNOWN_BACKENDS: dict[str, Backend] = {
    "hf": Backend(
        "draftworks.capture.engines.hf:load_hf_engine",
        "hf",
        numerics=1,
        last_hidden=LastHidden(normed=True),
        repeatable=True,
    ),
    "sglang": _SGLANG,
    "sglang_server": _SGLANG,
    "custom": Backend(
        "draftworks.capture.engines.custom:load_custom_engine",
        "custom",
        numerics=1,
        last_hidden=LastHidden(normed=True),
    ),
}


def find_backend(name: str) -> Backend:
    """The backend of that name; ConfigError with the known ones otherwise."""
    if name not in KNOWN_BACKENDS:
        close = difflib.get_close_matches(name, KNOWN_BACKENDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"unknown capture backend {name!r}: {hint}Known: {', '.join(sorted(KNOWN_BACKENDS))}")
    return KNOWN_BACKENDS[name]


def make_engine_identity(capture: CaptureSpec) -> EngineIdentity:
    """Identity of the engine that `capture` asks for, without loading it.

    The compute dtype is part of it: states computed in bfloat16 and stored in float32 are not those computed in float32.
    So is whatever else the engine is told that may change its numbers.
    """
    if capture.custom is not None:
        return EngineIdentity(f"custom:{capture.custom.engine}-{capture.compute_dtype}", capture.custom.numerics)
    backend = find_backend(capture.backend)
    told = f"+{digest(capture.engine_args)}" if capture.engine_args else ""
    return EngineIdentity(f"{backend.engine}-{capture.compute_dtype}{told}", backend.numerics)


def load_engine(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None = None
) -> TargetEngine:
    """Load a target with the backend that `capture` names onto `device`, which decides instead of `capture.device`.

    Raises:
        ConfigError: the backend is unknown, or the target is missing, unreadable or no causal language model.
        EngineError: the engine cannot be started or reached, or serves something else.
    """
    module, _, attribute = find_backend(capture.backend).loader.partition(":")
    return getattr(importlib.import_module(module), attribute)(target, capture, device, place)


def check_sequences(sequences: Sequence[Sequence[int]], context: int, vocab_size: int) -> None:
    """CaptureError for a row that is empty, longer than the context or has ids outside the vocabulary."""
    for index, row in enumerate(sequences):
        if not 0 < len(row) <= context:
            raise CaptureError(f"row {index} has {len(row)} tokens, expected 1 to {context} (the context)")
        if min(row) < 0 or max(row) >= vocab_size:
            raise CaptureError(f"row {index} has token ids {min(row)}..{max(row)}, expected 0..{vocab_size - 1}")
