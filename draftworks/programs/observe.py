"""The commands `draftworks observe` (what servers accept, by counters and by request) and `draftworks notify`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftworks.errors import ConfigError, DraftworksError
from draftworks.evaluation.report.text_tables import TextTable, print_table, print_text
from draftworks.programs.service_commands import CHECKOUT_REGISTRY, RegistryOption, TargetArgument
from draftworks.programs.start import CHECKOUT, report_error
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.words import format_count, suggest_or_list
from draftworks.targets.registry import Registry

if TYPE_CHECKING:
    from draftworks.production.observer import Observation, Observer
    from draftworks.production.served_logs import ServedLogs
    from draftworks.production.standing import ServerStanding


def observe(
    target: TargetArgument,
    every: Annotated[float | None, typer.Option("--every", help="Seconds between two readings.")] = None,
    duration: Annotated[
        float | None,
        typer.Option("--for", help="Seconds until it ends; needs --every. By default the servers are read once."),
    ] = None,
    no_read: Annotated[
        bool, typer.Option("--no-read", help="Show the series as they are; no server is asked.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Read the counters of a target's servers and the logs of its requests, and show what they accept beside their first
    hours and the walk."""
    from draftworks.production.observer import Observer
    from draftworks.production.served_logs import read_served_logs
    from draftworks.production.standing import assess_all

    observations: list[Observation] = []
    try:
        _check_times(every, duration, no_read)
        found = Registry(registry)
        spec, artifacts = found.load_target(target), ArtifactStore(found.resolve_var_folder())
        if spec.servers or spec.observation.requests is None:
            observer = Observer.of(spec, found.root, artifacts.root)
            observations = observer.recall() if no_read else _observe_for(observer, every, duration or 0.0)
        standings = assess_all(observations, spec.observation, artifacts, target)
        logs = None if spec.observation.requests is None else read_served_logs(spec, found.root, artifacts)
    except DraftworksError as error:
        raise report_error(error) from None
    _print(target, standings, logs, as_json)
    if any(one.problem for one in observations):
        raise typer.Exit(1)


def _check_times(every: float | None, duration: float | None, no_read: bool) -> None:
    for name, value in (("--every", every), ("--for", duration)):
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{name}: expected seconds, more than 0, found {value:g}")
    if duration is not None and every is None:
        raise ConfigError("--for: say how often too: --every SECONDS")
    if no_read and every is not None:
        raise ConfigError("--no-read asks no server: leave out --every")


def _observe_for(observer: Observer, every: float | None, duration: float) -> list[Observation]:
    """Read the servers at once, and then every `every` seconds for `duration` seconds, or until the user stops it."""
    ends = time.monotonic() + duration
    due = time.monotonic()
    observations = _observe_once(observer)
    try:
        while every is not None and (due := max(due + every, time.monotonic())) <= ends:
            time.sleep(max(0.0, due - time.monotonic()))
            observations = _observe_once(observer)
    except KeyboardInterrupt:
        typer.echo("stopped: what was read is kept", err=True)
    return observations


def _observe_once(observer: Observer) -> list[Observation]:
    observations = observer.observe()
    for one in observations:
        if one.problem is not None:
            typer.echo(f"warning: {one.problem}", err=True)
    return observations


def _print(target: str, standings: Sequence[ServerStanding], logs: ServedLogs | None, as_json: bool) -> None:
    from draftworks.production import served_view
    from draftworks.production.standing import CAPTION, COLUMNS, format_row, list_notes, to_json

    if as_json:
        requests = {} if logs is None else {"requests": served_view.to_json(logs)}
        typer.echo(json.dumps({"target": target, "servers": list(map(to_json, standings)), **requests}))
        return
    if standings or logs is None:
        rows = tuple(map(format_row, standings))
        print_table(TextTable(f"servers of {target}", COLUMNS, rows, CAPTION, digests=frozenset(("draft",))))
        for note in list_notes(standings):
            print_text(note)
    if logs is not None:
        _print_requests(target, logs)


def _print_requests(target: str, logs: ServedLogs) -> None:
    """Print a table for each strategy, and what was read."""
    from draftworks.production.served_view import CAPTION, COLUMNS, list_log_notes, list_notes, list_rows, title

    right = frozenset(("requests",))
    for one in logs.standings:
        print_table(TextTable(title(target, one), COLUMNS, tuple(list_rows(one)), CAPTION, right=right, heads=2))
        for note in list_notes(one):
            print_text(note)
    for note in list_log_notes(logs):
        print_text(note)


def notify(
    test: Annotated[bool, typer.Option("--test", help="Send one test message to each channel.")] = False,
    channel: Annotated[str | None, typer.Option("--channel", help="Only this one, by its name.")] = None,
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = CHECKOUT / "registry",
) -> None:
    """Show the channels of `notifications` and what they are still to be told; with --test, try them.

    Exit code 1 if a test message did not arrive.
    """
    from draftworks.notifications.channels import send_test
    from draftworks.notifications.outbox import Outbox

    failed = False
    try:
        found = Registry(registry)
        specs = found.load_deployment().notifications
        chosen = [each for each in specs if channel in (None, each.channel)]
        if not chosen:
            names = [each.channel for each in specs]
            what = "notifications: no channel" if channel is None else f"notifications: no channel {channel}"
            raise ConfigError(f"{registry / 'deployment.yaml'}: {what}; {suggest_or_list(channel or '', names)}")
        for spec in chosen:
            if not test:
                box = Outbox(found.resolve_var_folder(), spec.channel)
                message = box.find_message()
                unset = [name for name in (spec.url_env, spec.api_key_env) if name and not os.environ.get(name)]
                missing = f"; not set in this environment: {', '.join(unset)}" if unset else ""
                last = f"; attempt {message.attempts} failed: {message.problem}" if message and message.problem else ""
                pending = f"{format_count(len(box.list_pending()), 'event')} waiting"
                typer.echo(f"{spec.channel}: {', '.join(spec.events)}; {pending}{missing}{last}")
                continue
            posted = send_test(spec)
            failed = failed or bool(posted.problem)
            typer.echo(f"{spec.channel}: {posted.problem or 'the test message has arrived'}", err=bool(posted.problem))
    except DraftworksError as error:
        raise report_error(error) from None
    raise typer.Exit(1 if failed else 0)
