"""Runs a job for one target in this process like `dagster job execute`, with short log lines and the cause at the end:

    python -m jobs.run everything --target tiny -c overrides.yaml

Users call `draftworks run`, which checks the names first.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from resources.dagster_internals import UNUSED_GATES, create_command
from resources.dead_runs import CODE_LOCATION, start_ahead

CONSOLE = Path(__file__).with_name("console.yaml")
LOCATION = "spec_assets.definitions"
FAILED, MISUSED = 1, 2
_MISSING = re.compile(r'Job ".*" not found.*Found (\[.*\])', re.DOTALL)


def main(arguments: Sequence[str] | None = None, ahead: bool = False) -> int:
    """Execute a job. Returns the exit code: 0, 1 if the run failed (its last lines say why), 2 if it could not
    begin.

    Args:
        ahead: start the process from which those of steps are forked while this one imports Dagster.
    """
    options = _build_parser().parse_args(arguments)
    with _silence_steps():
        if ahead:
            start_ahead(LOCATION if options.file is None else CODE_LOCATION)
        return _execute(options)


def _execute(options: argparse.Namespace) -> int:
    import click
    import dagster as dg

    from draftworks.errors import DraftworksError
    from jobs.instance_problems import describe_instance_problem

    location = ["-m", LOCATION] if options.file is None else ["-f", str(options.file)]
    command = ["job", "execute", *location, "-j", options.job, "-c", str(CONSOLE)]
    command += [word for file in options.config for word in ("-c", str(file))]
    if options.target is not None:
        command += ["--tags", json.dumps({"dagster/partition": options.target})]
    logging.getLogger(UNUSED_GATES).setLevel(logging.ERROR)
    try:
        create_command().main(command, prog_name="dagster", standalone_mode=False)
    except (click.UsageError, DraftworksError, dg.DagsterError) as error:
        reason = error.format_message() if isinstance(error, click.ClickException) else str(error)
        reason = describe_instance_problem(error) or explain_missing_job(options.job, reason) or reason
        print(f"error: {reason}", file=sys.stderr)
        return MISUSED
    except click.ClickException:
        return FAILED
    except Exception as error:
        problem = describe_instance_problem(error)
        if problem is None:
            raise
        print(f"error: {problem}", file=sys.stderr)
        return FAILED
    return 0


def explain_missing_job(job: str, reason: str) -> str:
    """Return what a job that Dagster does not find may be; empty for another reason.

    A job of a strategy that no target uses does not exist, like the strategy's assets.
    """
    from draftworks.config.strategies import list_strategies
    from draftworks.storage.words import suggest_or_list

    listed = _MISSING.search(reason)
    if listed is None:
        return ""
    known = [name for name in re.findall(r"'([^']*)'", listed[1]) if not name.startswith("__")]
    strategy = next((name for name in list_strategies() if job.endswith(f"_{name}")), None)
    if strategy is not None and f"train_{strategy}" not in known:
        return f"no job {job}: no target of the registry uses {strategy}: name it in the entry, under strategies"
    return f"no job {job}; {suggest_or_list(job, known)}"


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run a job for one target.")
    parser.add_argument("job")
    parser.add_argument(
        "--target", help="the registry's name of the model; every job but `leaderboard` and `page` needs one"
    )
    parser.add_argument("-c", "--config", type=Path, action="append", default=[], help="run config (YAML), any number")
    parser.add_argument("-f", "--file", type=Path, help="Python file of another code location")
    return parser


@contextmanager
def _silence_steps() -> Iterator[None]:
    """Discard stdout of programs, which would interleave with the run's lines. The run page and var/runs have it."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    sys.exit(main(ahead=True))
