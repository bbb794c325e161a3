"""The order in which a stream was trained: one line per optimizer step, on the disk before the step is trained.

    {"schema": "draftworks.order.1", "global_batch_size": 4}
    [1, ["s7", "s3", "s9", "s1"]]

Arrival order is different in every run, so it is written down: from the log and the same references a run is repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from draftworks.dataflow.ref_queues import SampleRefQueue
from draftworks.dataflow.watermark import Watermark
from draftworks.errors import ConfigError, StoreError
from draftworks.features.contracts import SampleRef
from draftworks.storage.files import explain_full_disk, fsync, open_regular, parse_json

SCHEMA = "draftworks.order.1"


@dataclass(frozen=True)
class LoggedStep:
    """The samples of an optimizer step, in order; `end` is the offset after its line."""

    step: int
    samples: tuple[str, ...]
    end: int


class OrderLog:
    """The log of a training, open for appending.

    Args:
        keep_steps: steps that a resumed training has behind it; later ones of the log are cut off, because they are
            trained again. 0 begins a new log.

    Raises:
        ConfigError: the log is of a training with another global batch.
        StoreError: the log has fewer steps, is damaged, or cannot be written.
    """

    def __init__(self, path: Path, global_batch_size: int, keep_steps: int = 0) -> None:
        self._path = path
        self._next = keep_steps + 1
        self._file = -1
        end = 0 if keep_steps == 0 else _find_end(path, global_batch_size, keep_steps)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, end)
            if end == 0:
                self._write({"schema": SCHEMA, "global_batch_size": global_batch_size})
            fsync(path.parent)
        except OSError as error:
            self.close()
            raise self._explain(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, step: int, sample_ids: Iterable[str]) -> None:
        """Write the samples of the next step and flush them to the disk. Raises StoreError if that fails."""
        if step != self._next:
            raise ValueError(f"the log of the order continues with step {self._next}, found step {step}")
        try:
            self._write([step, list(sample_ids)])
        except OSError as error:
            raise self._explain(error) from error
        self._next += 1

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, value: object) -> None:
        line = memoryview(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)

    def _explain(self, error: OSError) -> StoreError:
        return explain_full_disk(error, self._path) or StoreError(
            f"{self._path}: expected a file that this user may write, found: {error}. The order of training is written "
            "there before each step"
        )


def read_order(path: Path, global_batch_size: int | None = None) -> Iterator[LoggedStep]:
    """Yield the logged steps; a last line that a killed process cut off is left out.

    Raises:
        ConfigError: the global batch is not `global_batch_size`.
        StoreError: there is no log, or it is damaged or of another version.
    """
    try:
        with open_regular(path) as stream:
            end = 0
            for number, line in enumerate(stream):
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                if number == 0:
                    size = _read_header(path, line)
                    if global_batch_size not in (None, size):
                        raise ConfigError(
                            f"{path}: the order was logged with global_batch_size {size}, found {global_batch_size}. "
                            "Train with the same, or begin a new log"
                        )
                else:
                    yield _read_step(path, number, line, end)
    except OSError as error:
        raise StoreError(f"{path}: expected the log of a training's order, found: {error}") from error


def read_trained_ids(path: Path, steps: int) -> Iterator[str]:
    """Yield the samples of the first `steps` logged steps, which a resumed training leaves out of its queue."""
    if steps == 0:
        return
    found = 0
    for logged in read_order(path):
        yield from logged.samples
        found = logged.step
        if found == steps:
            return
    raise _too_short(path, steps, found)


def replay_order(
    path: Path, refs: Iterable[SampleRef], global_batch_size: int, skip_ids: Iterable[str] = ()
) -> SampleRefQueue:
    """Return an ended queue of `refs` in the logged order; distributed by the same global batch it repeats the training.

    Args:
        skip_ids: samples that a resumed repetition has behind it.

    Raises:
        ConfigError, StoreError: as `read_order`; also if the log names a sample that is not among `refs`.
    """
    by_id = {ref.sample_id: ref for ref in refs}
    ids = [sample_id for logged in read_order(path, global_batch_size) for sample_id in logged.samples]
    missing = [sample_id for sample_id in ids if sample_id not in by_id]
    if missing:
        raise StoreError(
            f"{path} names {len(missing)} samples without a reference, such as {missing[0]}: the training cannot be "
            "repeated without them"
        )
    queue = SampleRefQueue(Watermark(samples=max(1, len(ids))), skip_ids=skip_ids)
    queue.put(by_id[sample_id] for sample_id in ids)
    queue.close()
    return queue


def _find_end(path: Path, global_batch_size: int, steps: int) -> int:
    found = 0
    for logged in read_order(path, global_batch_size):
        found = logged.step
        if found == steps:
            return logged.end
    raise _too_short(path, steps, found)


def _too_short(path: Path, expected: int, found: int) -> StoreError:
    return StoreError(
        f"{path}: expected the order of at least {expected} steps, which the checkpoint has behind it, found {found}. "
        "This is not the log of that training"
    )


def _read_header(path: Path, line: bytes) -> int:
    try:
        header = parse_json(line)
        if header["schema"] != SCHEMA:
            raise ValueError(f"schema {header['schema']!r}, expected {SCHEMA!r}")
        return int(header["global_batch_size"])
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{path} is no log of a training's order of this version ({error})") from error


def _read_step(path: Path, number: int, line: bytes, end: int) -> LoggedStep:
    try:
        step, samples = parse_json(line)
        if step != number or not all(isinstance(sample_id, str) for sample_id in samples):
            raise ValueError(f"expected the sample ids of step {number}")
        return LoggedStep(step, tuple(samples), end)
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path}, line {number + 1} is damaged: {error}") from error
