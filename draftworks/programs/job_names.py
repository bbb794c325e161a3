"""Names of Dagster's jobs, known without Dagster, so that a wrong one is told in a moment. Torch-free."""

from __future__ import annotations

from draftworks.config.strategies import list_strategies
from draftworks.errors import ConfigError
from draftworks.storage.suggestions import list_fitting, suggest_or_list
from draftworks.targets.registry import Registry
from draftworks.targets.used_strategies import list_used_strategies

STANDARD = ("everything", "prepare", "evaluate", "serve", "resolve", "leaderboard", "observe", "prune")
GATES = ("judge_fp8", "compare_thinking")
WITHOUT_TARGET = ("leaderboard", "prune")
OF_STRATEGY = ("train", "promote", "rollback", "decide", "tune", "retrain")
"""What the names of a strategy's jobs begin with."""


def list_jobs(strategies: list[str] | tuple[str, ...]) -> list[str]:
    """Return the names of all jobs of these strategies, those that most people want first."""
    return [*STANDARD, *GATES, *(f"{kind}_{strategy}" for kind in OF_STRATEGY for strategy in strategies)]


def require_job(job: str, target: str | None, registry: Registry) -> None:
    """Raise ConfigError if no registry has such a job, or if the job is of a target and none is given."""
    if job not in list_jobs(list_strategies()):
        known = list_jobs(list_used_strategies(registry))
        raise ConfigError(f"no job {job[:40]!r}; {suggest_or_list(job, known)}")
    if target is None and job not in WITHOUT_TARGET:
        names = registry.list_targets()
        example = names[0] if len(names) == 1 else "NAME"
        raise ConfigError(
            f"{job} works on one target, and none is given: draftworks run {job} --target {example}; there "
            f"{'is' if len(names) == 1 else 'are'}: {list_fitting(names)}"
        )
