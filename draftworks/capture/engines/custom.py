"""The `custom` backend: a user's target engine, loaded from an entry point; all its results are validated."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from draftworks.capture.background import TransformedFuture
from draftworks.capture.engine import EnginePlace, Generated, TargetEngine, find_backend, make_engine_identity
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, EngineError
from draftworks.storage.identity import EngineIdentity, LayerTap
from draftworks.storage.words import suggest


def load_custom_engine(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None = None
) -> CheckedEngine:
    """Load the engine that `capture.custom.entry_point` returns when it is called with the same arguments.

    Raises:
        ConfigError: the entry point does not exist, or does not return a TargetEngine.
    """
    if capture.custom is None:
        raise ConfigError("capture backend custom needs capture.custom, with entry_point and engine")
    entry_point = capture.custom.entry_point
    engine = _load_entry_point(entry_point)(target, capture, device, place)
    if not isinstance(engine, TargetEngine):
        raise ConfigError(
            f"capture.custom.entry_point {entry_point}: expected it to return a "
            f"draftworks.capture.engine.TargetEngine, found {_describe_type(engine)}"
        )
    return CheckedEngine(
        engine, make_engine_identity(capture), target, getattr(torch, capture.compute_dtype), entry_point
    )


class CheckedEngine(TargetEngine):
    """Wrapper of a user's engine that checks every result before it is used.

    Args:
        identity: the engine's identity according to the registry.
        dtype: required dtype of its hidden states.
        name: name of the engine in messages.

    Raises (all methods): EngineError if a result is not as `TargetEngine` specifies, beside the engine's own errors.
    """

    backend = "custom"

    def __init__(
        self, engine: TargetEngine, identity: EngineIdentity, target: TargetFiles, dtype: torch.dtype, name: str
    ) -> None:
        self.identity = identity
        self.last_hidden = find_backend(self.backend).last_hidden
        self.concurrent = engine.concurrent
        self.tested = engine.tested
        self.replicas = engine.replicas
        self.batches_in_flight_limit = engine.batches_in_flight_limit
        self._engine = engine
        self._target = target
        self._dtype = dtype
        self._name = name

    @property
    def display_name(self) -> str:
        return f"the engine of {self._name}"

    @property
    def bytes_in_flight_limit(self) -> int | None:
        return self._engine.bytes_in_flight_limit

    def capture(self, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> list[dict[str, Tensor]]:
        return self._require_captured(self._engine.capture(sequences, taps), sequences, taps)

    def submit(self, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> Future[list[dict[str, Tensor]]]:
        answer = self._engine.submit(sequences, taps)
        if not isinstance(answer, Future):
            raise self._make_contract_error(f"submit: expected a Future, found {_describe_type(answer)}")

        def copy(captured: Any) -> list[dict[str, Tensor]]:
            """Copy before the next batch begins, in which a user's engine may use its memory again."""
            streams = self._require_captured(captured, sequences, taps)
            return [{name: stream.clone() for name, stream in each.items()} for each in streams]

        return TransformedFuture(answer, copy)

    def cancel(self, answers: Collection[Future[list[dict[str, Tensor]]]]) -> None:
        self._engine.cancel([answer.source for answer in answers if isinstance(answer, TransformedFuture)])

    def _require_captured(
        self, captured: Any, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]
    ) -> list[dict[str, Tensor]]:
        self._require_one_each("capture", captured, sequences)
        expected = [*(tap.name for tap in taps), "last"]
        for sequence, streams in zip(sequences, captured, strict=True):
            if set(streams) != set(expected):
                raise self._make_contract_error(
                    f"capture: expected the streams {sorted(expected)}, found {sorted(streams)}"
                )
            for name, stream in streams.items():
                self._require_tensor(f"capture: stream {name}", stream, (len(sequence), self._target.hidden_size))
                if stream.dtype != self._dtype:
                    raise self._make_contract_error(
                        f"capture: stream {name}: expected {self._dtype}, found {stream.dtype}"
                    )
        return [{name: streams[name] for name in expected} for streams in captured]

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        found = self._engine.logits(sequences)
        self._require_one_each("logits", found, sequences)
        for sequence, logits in zip(sequences, found, strict=True):
            positions = len(logits) if isinstance(logits, Tensor) and logits.dim() else 0
            self._require_tensor("logits", logits, (min(max(positions, 1), len(sequence)), self._target.vocab_size))
        return found

    def head_logits(self, last: Tensor) -> Tensor:
        found = self._engine.head_logits(last)
        self._require_tensor("head_logits", found, (len(last), self._target.vocab_size))
        return found

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: ResponseSpec,
        sample_ids: Sequence[str],
        max_total: int,
        turn: int = 0,
        end_ids: Collection[int] = (),
    ) -> list[Generated]:
        found = self._engine.generate(prompts, sampling, sample_ids, max_total, turn, end_ids)
        self._require_one_each("generate", found, prompts)
        for prompt, answer in zip(prompts, found, strict=True):
            if not isinstance(answer, Generated):
                raise self._make_contract_error(f"generate: expected Generated, found {_describe_type(answer)}")
            room = max(0, min(sampling.max_new_tokens, max_total - len(prompt)))
            if len(answer.ids) > room:
                raise self._make_contract_error(f"generate: expected at most {room} tokens, found {len(answer.ids)}")
            outside = [token for token in answer.ids if not 0 <= token < self._target.vocab_size]
            if outside:
                raise self._make_contract_error(
                    f"generate: expected ids 0..{self._target.vocab_size - 1}, found {outside[0]}"
                )
        return found

    def close(self) -> None:
        self._engine.close()

    def _require_one_each(self, method: str, found: Any, inputs: Sequence[Any]) -> None:
        if not isinstance(found, list) or len(found) != len(inputs):
            count = f"{len(found)} entries" if isinstance(found, list) else _describe_type(found)
            raise self._make_contract_error(
                f"{method}: expected a list with one entry for each of {len(inputs)} sequences, found {count}"
            )

    def _require_tensor(self, what: str, found: Any, shape: tuple[int, ...]) -> None:
        if not isinstance(found, Tensor):
            raise self._make_contract_error(f"{what}: expected a tensor, found {_describe_type(found)}")
        if tuple(found.shape) != shape or found.device.type != "cpu" or not found.is_floating_point():
            expected = f"floating point {shape} on cpu"
            raise self._make_contract_error(
                f"{what}: expected {expected}, found {found.dtype} {tuple(found.shape)} on {found.device}"
            )

    def _make_contract_error(self, what: str) -> EngineError:
        return EngineError(
            f"the engine of {self._name} breaks the contract of draftworks.capture.engine.TargetEngine: {what}"
        )


def _load_entry_point(entry_point: str) -> Callable[..., Any]:
    where = f"capture.custom.entry_point {entry_point}"
    name, _, attribute = entry_point.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the missing module is one that the entry point's module imports
        raise ConfigError(
            f"{where}: there is no module {error.name}. Install its package in the environment that runs the platform, "
            "or correct the name"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        hint = suggest(attribute, vars(module))
        what = "has no" if found is None else "has no callable"
        raise ConfigError(f"{where}: module {name} {what} {attribute}" + (f"; {hint}" if hint else ""))
    return found


def _describe_type(value: Any) -> str:
    return f"a {type(value).__name__}"
