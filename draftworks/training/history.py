"""The history of a training as plain numbers: plotted, reported, and written to history.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftworks.errors import StoreError
from draftworks.evaluation.result import EvalResult
from draftworks.storage.atomic import publish_json
from draftworks.storage.regular_files import read_json

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class TrainPoint:
    """Means and sums over consecutive optimizer steps that end with number `step`, counted from 1.

    Attributes:
        epoch: data seen so far, in epochs.
        loss: of these steps, as the strategy weighs it; None if nothing was supervised.
        accuracy, simulated_acc_len: rungs 0 (first position) and 1 of the acceptance ladder, on training data.
        lr, grad_norm: of the last step; the norm is before clipping.
        tokens: all tokens of these steps over all ranks, without padding.
        tokens_per_s: of training alone, without evaluations.
        seconds: of training alone, since its start.
    """

    step: int
    epoch: float
    loss: float | None
    accuracy: float
    simulated_acc_len: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    seconds: float


@dataclass(frozen=True)
class EvalPoint:
    """The held-out result after optimizer step `step`."""

    step: int
    seconds: float
    result: EvalResult


@dataclass(frozen=True)
class Session:
    """One process group's part of a training, which began or resumed after `start_step` steps."""

    start_step: int
    world_size: int
    started: float
    """Unix time, in seconds."""


@dataclass
class History:
    """What `Trainer.fit` returns. `total_steps` were planned, `steps` were done."""

    total_steps: int
    train: list[TrainPoint] = field(default_factory=list)
    evals: list[EvalPoint] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.train[-1].step if self.train else 0

    @property
    def tokens(self) -> int:
        return sum(point.tokens for point in self.train)

    @property
    def seconds(self) -> float:
        return self.train[-1].seconds if self.train else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def find_evaluation(self, step: int) -> EvalResult | None:
        """Return the held-out result after this step, None if there is none."""
        return next((point.result for point in self.evals if point.step == step), None)

    def first_loss(self, share: float = 0.1) -> float | None:
        """Return the mean loss of the first `share` of the recorded points, at least one, or None.

        None if nothing was supervised. After one step, the first loss is also the last.
        """
        return _mean(self._losses()[: self._count(share)])

    def last_loss(self, share: float = 0.1) -> float | None:
        """Return the mean loss of the last `share` of the recorded points, at least one, or None."""
        return _mean(self._losses()[-self._count(share) :])

    def _losses(self) -> list[float]:
        return [point.loss for point in self.train if point.loss is not None]

    def _count(self, share: float) -> int:
        return max(1, round(share * len(self._losses())))

    def to_json(self) -> dict[str, Any]:
        """Return all values; each evaluation includes its metrics, for readers that do not compute ratios."""
        evals = [
            {"step": e.step, "seconds": e.seconds, "result": e.result.to_json(), "metrics": e.result.metrics()}
            for e in self.evals
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "total_steps": self.total_steps,
            "train": [asdict(point) for point in self.train],
            "evals": evals,
            "sessions": [asdict(session) for session in self.sessions],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> History:
        return cls(
            total_steps=values["total_steps"],
            train=[TrainPoint(**point) for point in values["train"]],
            evals=[EvalPoint(e["step"], e["seconds"], EvalResult.from_json(e["result"])) for e in values["evals"]],
            sessions=[Session(**session) for session in values["sessions"]],
        )

    def save(self, path: Path) -> None:
        publish_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> History:
        """Read what `save` wrote.

        Raises:
            StoreError: missing, damaged, or of another schema.
        """
        try:
            values = read_json(path)
            if values["schema_version"] != SCHEMA_VERSION:
                raise StoreError(f"{path}: schema {values['schema_version']}, expected {SCHEMA_VERSION}")
            return cls.from_json(values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path}: not a training history ({error!r}). Train the draft again") from error


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
