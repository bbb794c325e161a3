"""The command `draftworks notify`: the channels by which people are told, and a test message."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from draftworks.errors import ConfigError, DraftworksError
from draftworks.programs.start import CHECKOUT, report_error
from draftworks.storage.suggestions import suggest_or_list
from draftworks.storage.words import format_count
from draftworks.targets.registry import Registry


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
                pending = f"{format_count(box.count_pending(), 'event')} waiting"
                typer.echo(f"{spec.channel}: {', '.join(spec.events)}; {pending}{missing}{last}")
                continue
            posted = send_test(spec)
            failed = failed or bool(posted.problem)
            typer.echo(f"{spec.channel}: {posted.problem or 'the test message has arrived'}", err=bool(posted.problem))
    except DraftworksError as error:
        raise report_error(error) from None
    raise typer.Exit(1 if failed else 0)
