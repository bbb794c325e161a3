"""Interface of a target engine, and the table of backends that load one by name."""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from draftworks.capture.background import BackgroundWorker
from draftworks.config.capture import SGLangSpec, VLLMSpec
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, ConfigError
from draftworks.sglang.job_servers import JobServers
from draftworks.storage.identity import EngineIdentity, LastHidden, LayerTap, digest
from draftworks.storage.words import suggest_or_list
from draftworks.targets.fitted_defaults import describe_computation
from draftworks.targets.stored_head import require_one_head

log = logging.getLogger(__name__)


def derive_seed(seed: int, key: str) -> int:
    """Return a seed for one request, 0 to 2**31 - 1, derived from the run's seed and the request's `key`."""
    hashed = sha256(f"{seed}/{key}".encode()).digest()
    return int.from_bytes(hashed[:4], "big") >> 1


@dataclass(frozen=True)
class Generated:
    """One generated answer. `ids` includes the end token if there is one; `finished` is False if a limit cut it off."""

    ids: tuple[int, ...]
    finished: bool


@dataclass(frozen=True, eq=False)
class AskedPrompt:
    """A prompt that waits for its answer; random numbers of the answer derive from `sample_id` and `turn`."""

    sample_id: str
    prompt: tuple[int, ...]
    turn: int = 0


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt, the very object that was asked, and its answer."""

    asked: AskedPrompt
    answer: Generated


@dataclass(frozen=True)
class Advance:
    """What an engine did since it told last.

    Attributes:
        read: tokens of prompts, if nothing else took time; else 0.
        made: tokens of answers, those of unfinished ones included.
    """

    answered: tuple[AnsweredPrompt, ...]
    read: int
    made: int


class TargetEngine(ABC):
    """A loaded target model: captures hidden states and generates responses.

    Attributes:
        backend: name in `KNOWN_BACKENDS`.
        identity: identity of the engine; part of every feature key.
        last_hidden: norm convention of the stream `last`.
        concurrent: whether `generate` may be called from several threads, which then raises its throughput.
        tested: whether this version of the underlying software is one that was tested; if not, nothing that it computes
            is used without a comparison.
        replicas: copies of the target that answer in parallel.
        batches_in_flight_limit: how many submitted batches are of use; None is no limit. One that runs and one that
            waits keep an engine in this process busy.
    """

    backend: ClassVar[str]
    concurrent: bool = False
    tested: bool = True
    replicas: int = 1
    batches_in_flight_limit: int | None = 2
    identity: EngineIdentity
    last_hidden: LastHidden
    _worker: BackgroundWorker | None = None

    @property
    def display_name(self) -> str:
        """Name of the engine in messages."""
        return f"the engine of backend {self.backend}"

    def list_members(self) -> Sequence[TargetEngine]:
        """Return the engines that share the work, each of which can be called by itself."""
        return (self,)

    @abstractmethod
    def capture(self, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> list[dict[str, Tensor]]:
        """Return the hidden states of every sequence, by stream name ("hf3", "last").

        Each stream is (S, H) on CPU in the compute dtype, with S the sequence's own length.

        Raises:
            CaptureError: a sequence is empty, too long or has ids outside the vocabulary; a tap is outside the target.
        """

    def submit(self, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> Future[list[dict[str, Tensor]]]:
        """Begin a `capture` and return the future of its result.

        Here one background thread runs `capture` for one batch after another. An engine for which more requests at a time
        are of use overrides this. Nobody may call other methods of an engine that is not `concurrent` until all futures
        are done.
        """
        if self._worker is None:
            self._worker = BackgroundWorker()
        # Both are settings of a thread.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        with_gradients = torch.is_grad_enabled()

        def capture() -> list[dict[str, Tensor]]:
            if device is not None:
                torch.cuda.set_device(device)
            with torch.set_grad_enabled(with_gradients):
                return self.capture(sequences, taps)

        return self._worker.submit(capture)

    def cancel(self, answers: Collection[Future[list[dict[str, Tensor]]]]) -> None:
        """Drop what was submitted and is not done: nobody will ask for these answers."""
        if self._worker is not None:
            self._worker.cancel(answers)

    @property
    def bytes_in_flight_limit(self) -> int | None:
        """Bytes of hidden states that there is room for between engine and reader; None is no limit."""
        return None

    @abstractmethod
    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the target's own logits of the last R positions of every sequence, (R, V) on CPU.

        Captured features are verified against them. R is at least 1 and at most S: as many positions as the engine can
        give at little cost.
        """

    @abstractmethod
    def head_logits(self, last: Tensor) -> Tensor:
        """Return logits (R, V) on CPU, computed by the target's head alone from positions (R, H) of `last`."""

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
        """Return responses to prompts; prompt and response have at most `max_total` tokens together.

        See draftworks.capture.engines.generate.
        """

    def answer_stream(
        self,
        waiting: deque[AskedPrompt],
        sampling: ResponseSpec,
        max_total: int,
        end_ids: Collection[int] = (),
    ) -> Iterator[Advance]:
        """Answer what is waiting, from its left, and what is added meanwhile; yield what was done, often.

        Here `batch_size` prompts of a turn are one call of `generate`. An engine whose batch prompts can join overrides
        this.
        """
        while waiting:
            turn, batch = waiting[0].turn, list[AskedPrompt]()
            while waiting and waiting[0].turn == turn and len(batch) < sampling.batch_size:
                batch.append(waiting.popleft())
            ids = [each.sample_id for each in batch]
            made = self.generate([each.prompt for each in batch], sampling, ids, max_total, turn=turn, end_ids=end_ids)
            answered = tuple(map(AnsweredPrompt, batch, made))
            yield Advance(answered, 0, sum(len(each.ids) for each in made))

    def share_with_job(self) -> None:  # noqa: B027 - most engines are used by one process
        """Let the other ranks of the job use the servers of this engine, and let it use theirs.

        Call it when the engine has been compared with the target's weights.
        """

    def close(self) -> None:  # noqa: B027 - an engine inside this process has nothing to close
        """Stop what the engine runs outside this process."""


@dataclass(frozen=True)
class EnginePlace:
    """Resources for engines that need more than a target and a device.

    Attributes:
        folder: on the disk of this machine, used by this engine only and created by it.
        taps: all taps that will be captured, beside `last`; None = nothing, the engine only generates.
        head: reads the target's output matrix (V, H), when it is needed.
        embedding: reads the target's input matrix (V, H), when it is needed.
        local_rank: rank of this process among those of this machine, each of which has an engine.
        longest: number of tokens of the longest sequence that will be requested; 0 if it is not known.
        servers: the servers of a job of several nodes, whose ranks share them; None for a job on one machine.
    """

    folder: Path
    taps: tuple[LayerTap, ...] | None = None
    head: Callable[[], Tensor] | None = None
    embedding: Callable[[], Tensor] | None = None
    sglang: SGLangSpec = field(default_factory=SGLangSpec)
    vllm: VLLMSpec = field(default_factory=VLLMSpec)
    local_rank: int = 0
    longest: int = 0
    servers: JobServers | None = None


@dataclass(frozen=True)
class Backend:
    """A way to run targets.

    Attributes:
        loader: "module:function" with the arguments of `load_engine`.
        engine: name of the engine in identities.
        numerics: revision, raised when the engine's numbers change beyond rounding; old features then no longer count.
        repeatable: whether the same batch gives the same bits again, in another process on the same machine. Only then
            does a capture that resumes repeat the batches that it began with.
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
_VLLM = Backend(
    "draftworks.capture.engines.vllm_loading:load_vllm_engine",
    "vllm",
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
    "vllm": _VLLM,
    "vllm_server": _VLLM,
    "custom": Backend(
        "draftworks.capture.engines.custom:load_custom_engine",
        "custom",
        numerics=1,
        last_hidden=LastHidden(normed=True),
    ),
}


def find_backend(name: str) -> Backend:
    """Return the backend of that name; raise ConfigError with the known names if there is none."""
    if name not in KNOWN_BACKENDS:
        raise ConfigError(f"unknown capture backend {name!r}: {suggest_or_list(name, sorted(KNOWN_BACKENDS))}")
    return KNOWN_BACKENDS[name]


def make_engine_identity(capture: CaptureSpec) -> EngineIdentity:
    """Return the identity of the engine that `capture` configures, without loading it.

    The compute dtype is part of it: states computed in bfloat16 and stored in float32 differ from those computed in
    float32. All other engine arguments that may change its numbers are part of it too.
    """
    if capture.custom is not None:
        return EngineIdentity(f"custom:{capture.custom.engine}-{capture.compute_dtype}", capture.custom.numerics)
    backend = find_backend(capture.backend)
    arguments = f"+{digest(capture.engine_args)}" if capture.engine_args else ""
    return EngineIdentity(f"{backend.engine}-{capture.compute_dtype}{arguments}", backend.numerics)


def load_engine(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None = None
) -> TargetEngine:
    """Load a target with the backend that `capture` names onto `device`, which overrides `capture.device`.

    Raises:
        ConfigError: the backend is unknown, or the target is missing, unreadable or not a causal language model.
        StoreError: the target's files hold two heads that differ.
        EngineError: the engine cannot be started or reached, or serves something else.
    """
    module, _, attribute = find_backend(capture.backend).loader.partition(":")
    require_one_head(target)
    if not capture.server.external:
        log.info("target %s: %s", target.name, describe_computation(capture.compute_dtype, device.type))
    return getattr(importlib.import_module(module), attribute)(target, capture, device, place)


def check_sequences(sequences: Sequence[Sequence[int]], context: int, vocab_size: int) -> None:
    """Raise CaptureError for a sequence that is empty, longer than the context or has ids outside the vocabulary."""
    for index, ids in enumerate(sequences):
        if not 0 < len(ids) <= context:
            raise CaptureError(f"sequence {index} has {len(ids)} tokens, expected 1 to {context} (the context)")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise CaptureError(f"sequence {index} has token ids {min(ids)}..{max(ids)}, expected 0..{vocab_size - 1}")
