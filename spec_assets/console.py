"""One short line per event on the terminal: time, step, message. The UI and the event log keep everything."""

from __future__ import annotations

import logging
import sys

import dagster as dg


class ShortFormatter(logging.Formatter):
    """`18:43:36  eagle3_draft          step=40/480 loss=2.31`; an error is followed by its cause, whole."""

    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, "dagster_meta", {})
        message = meta.get("orig_message") or record.getMessage()
        step = meta.get("step_key") or meta.get("job_name") or ""
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname} "
        return f"{self.formatTime(record, '%H:%M:%S')}  {step:<22} {mark}{message}{_cause(record)}"


def _cause(record: logging.LogRecord) -> str:
    """What made a step fail: our own description where there is one, else Dagster's error with its traceback."""
    data = getattr(getattr(record, "dagster_event", None), "event_specific_data", None)
    if getattr(data, "first_step_failure_event", None):
        return ""  # a run that failed because of a step, which has said it already
    described = getattr(getattr(data, "user_failure_data", None), "description", None)
    error = getattr(data, "error", None)
    if error and error.cls_name == dg.DagsterExecutionInterruptedError.__name__:
        return "\ninterrupted\n"
    cause = described or (error.to_string() if error else "")
    return f"\n{cause}\n" if cause else ""


@dg.logger(
    dg.Field(str, is_required=False, default_value="INFO"), description="Short lines for a person at a terminal."
)
def console(init_context: dg.InitLoggerContext) -> logging.Logger:
    logger = logging.Logger("draftworks", level=init_context.logger_config)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ShortFormatter())
    handler.addFilter(lambda record: not record.getMessage().endswith("successfully opened dagster pipes."))
    logger.addHandler(handler)
    return logger
