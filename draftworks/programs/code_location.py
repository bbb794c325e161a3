"""The code location of another registry folder than the checkout's, and the jobs that it has.

Dagster starts the processes of a run's steps anew, and each finds its assets by the path of a Python file. So the registry
folder stands in a file, and not in an argument or the environment of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from draftworks.config.strategies import list_strategies
from draftworks.errors import ConfigError
from draftworks.storage.files import publish_file
from draftworks.storage.words import list_fitting, suggest_or_list
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import list_used_strategies

FOLDER = "code_location"
"""In `var`."""
_DEFINITIONS = '''\
"""Code location of a registry: written by `draftworks run --registry` and `draftworks ui --registry`."""

from pathlib import Path

from spec_assets.code_location import build_definitions

defs = build_definitions(Path({registry!r}))
'''


@dataclass(frozen=True)
class CodeLocation:
    """The files by which Dagster loads the definitions of a registry.

    Attributes:
        definitions: of one run.
        workspace: of the UI; the location has the name of the registry's folder there.
    """

    definitions: Path
    workspace: Path


def write_code_location(registry: Registry, checkout: Path) -> CodeLocation:
    """Write the code location of a registry to its `var`, unless it is there.

    Args:
        checkout: folder of `spec_assets/`.

    Raises:
        ConfigError: the registry's `deployment.yaml` is invalid.
        OSError: `var` cannot be written to.
    """
    folder, root = registry.resolve_var_folder() / FOLDER, registry.root.resolve()
    location = CodeLocation(folder / "definitions.py", folder / "workspace.yaml")
    _publish(location.definitions, _DEFINITIONS.format(registry=str(root)))
    loaded = {
        "relative_path": location.definitions.name,
        "working_directory": str(checkout),
        "location_name": root.name,
    }
    _publish(location.workspace, yaml.safe_dump({"load_from": [{"python_file": loaded}]}))
    return location


def _publish(path: Path, text: str) -> None:
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return  # a UI that watches the file need not load it again
    with publish_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


STANDARD = ("everything", "prepare", "evaluate", "serve", "resolve", "leaderboard", "page", "observe", "prune")
GATES = ("judge_fp8", "compare_thinking")
WITHOUT_TARGET = ("leaderboard", "page", "prune")
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
