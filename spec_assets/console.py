"""The logger of terminals: one line per event with time, step and message. The event log has everything."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Any, TextIO

import dagster as dg

from resources.run_problems import INTERRUPTED, MEANT_FOR_A_PERSON, describe_innermost

LONGEST_FAILURE = 300


class ShortFormatter(logging.Formatter):
    """`18:43:36  eagle3_draft          step=40/480 loss=2.31`; a failed step is one line, a failed run the whole
    message."""

    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, "dagster_meta", {})
        message = _format_failure(record) or meta.get("orig_message") or record.getMessage()
        step = meta.get("step_key") or meta.get("job_name") or ""
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname} "
        return f"{self.formatTime(record, '%H:%M:%S')}  {step:<22} {mark}{message}"


def _format_failure(record: logging.LogRecord) -> str | None:
    """Return the message of a failure event, None for other events.

    Of a step it is one line: the run's process logs the whole cause at the end (`spec_assets.executor`).
    """
    event = getattr(record, "dagster_event", None)
    data = getattr(event, "event_specific_data", None)
    error = getattr(data, "error", None)
    if event is None or error is None:
        return None
    if _was_interrupted(data):
        return "interrupted"
    if event.is_step_failure:
        description = getattr(getattr(data, "user_failure_data", None), "description", None)
        lines = (description or describe_innermost(error).splitlines()[-1]).splitlines()
        return f"failed: {lines[0][:LONGEST_FAILURE]}{' ...' if lines[1:] or lines[0][LONGEST_FAILURE:] else ''}"
    if not event.is_failure:
        return None
    cause = describe_innermost(error)
    return cause if error.cls_name in MEANT_FOR_A_PERSON else f"{event.message}\n{cause}"


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether to print the record. Left out is what the run's last message repeats (failed steps, steps that were not
    executed, an interruption), and checks that were skipped with their asset."""
    message = getattr(record, "dagster_meta", {}).get("orig_message") or record.getMessage()
    event = getattr(record, "dagster_event", None)
    data = getattr(event, "event_specific_data", None)
    return not (
        getattr(data, "first_step_failure_event", None)
        or (event is not None and event.is_run_failure and _was_interrupted(data))
        or message.endswith("successfully opened dagster pipes.")
        or (message.startswith("Dependencies for step ") and message.endswith("Not executing."))
        or (message.startswith("Skipping step ") and "due to skipped dependencies" in message)
    )


def _was_interrupted(data: Any) -> bool:
    error = getattr(data, "error", None)
    return error is not None and error.cls_name == INTERRUPTED


@dg.logger(
    dg.Field(str, is_required=False, default_value="INFO"), description="Short lines for a person at a terminal."
)
def console(init_context: dg.InitLoggerContext) -> logging.Logger:
    logger = logging.Logger("draftworks", level=init_context.logger_config)
    handler = logging.StreamHandler(open_terminal())
    handler.setFormatter(ShortFormatter())
    handler.addFilter(_is_worth_a_line)
    logger.addHandler(handler)
    return logger


def open_terminal() -> TextIO:
    """Return this process's current stderr as a line-buffered stream.

    While a step runs Dagster turns stderr into a file, and a `tail` copies that to the terminal until it is ended
    together with the step: under load before it has copied the last lines, which have the cause. A logger is made
    before that, and keeps its own copy of the descriptor."""
    try:
        descriptor = os.dup(sys.stderr.fileno())
    except (OSError, io.UnsupportedOperation):  # stderr is not a file: a test's capture, a notebook
        return sys.stderr
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
