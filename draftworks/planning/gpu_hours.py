"""GPU-hours of another training of a draft, with all that it needs and that does not exist."""

from __future__ import annotations

from draftworks.config.registry_files import TrainingSpec
from draftworks.planning.estimates import Estimate
from draftworks.planning.plan import make_plan
from draftworks.planning.subject import PlanSubject
from draftworks.targets.registry import Registry


def estimate_gpu_hours(
    registry: Registry, target: str, strategy: str, training: TrainingSpec | None = None
) -> Estimate:
    """Return the GPU-hours of training a draft again as the registry says: missing answers and features, the training
    itself, its evaluation and its export. A process on the CPU counts as a GPU.

    Nothing is computed but by records of earlier results, so it costs milliseconds. No weights are read.

    Args:
        training: settings in place of the registry's, such as fewer steps for a tune that goes on from the draft in
            service. By default those of the registry, as a training from the start has them.

    Raises:
        ConfigError: the target's entry is invalid, has no such strategy, or nothing is known of the size of its data.
        DataError: a data set has no files.
    """
    subject = PlanSubject.of(target, registry)
    trainings = {} if training is None else {strategy: training}
    return make_plan(subject, [strategy], trainings, anew=True).chosen.gpu_hours
