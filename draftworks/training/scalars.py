"""Names and values of the curves of a training, the same for TensorBoard and for every tracker."""

from __future__ import annotations

from draftworks.training.history import EvalPoint, TrainPoint

TRAIN_SCALARS = ("loss", "accuracy", "simulated_acc_len", "lr", "grad_norm", "tokens_per_s")


def list_train_scalars(point: TrainPoint) -> dict[str, float]:
    """Return the figures of a training point; one without a value is absent."""
    values = {f"train/{name}": getattr(point, name) for name in TRAIN_SCALARS}
    return {name: value for name, value in values.items() if value is not None}


def list_eval_scalars(point: EvalPoint) -> dict[str, float]:
    """Return the metrics of an evaluation; of a list each item, under its index."""
    found: dict[str, float] = {}
    for name, value in point.result.metrics().items():
        if isinstance(value, list):
            found.update({f"{name}/{index}": item for index, item in enumerate(value)})
        else:
            found[name] = value
    return found
