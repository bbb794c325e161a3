"""Options of a data set of served prompts: redaction, what happens to secrets, limits. Torch-free."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import Spec

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
Masked = Literal["email", "phone", "ip", "secret"]


class RedactionSpec(Spec):
    """A hook that removes what must not be stored: a command, or a function that runs in a process of its own."""

    command: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Program and arguments, run without a shell in the registry's folder: rows as JSONL on stdin, as many "
        "lines on stdout.",
    )
    function: str | None = Field(
        default=None, description="module:function of an installed package: a list of rows to a list as long."
    )
    timeout_s: float = Field(default=300.0, gt=0, le=86_400, description="Time limit of one call.")
    rows_per_call: int = Field(default=1000, ge=1, le=100_000, description="Rows given to one call at most.")

    @field_validator("function")
    @classmethod
    def _check_function(cls, value: str | None) -> str | None:
        if value is not None and not FUNCTION.fullmatch(value):
            raise ValueError(f"expected module:function, found {value!r}")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> RedactionSpec:
        if (self.command is None) == (self.function is None):
            raise ValueError("redaction is either a command or a function: give one of them")
        return self

    def to_identity(self) -> dict[str, Any]:
        return self.model_dump(include={"command", "function"})


class ServedSpec(Spec):
    """How logged requests become prompts."""

    mask: list[Masked] = Field(
        default=["email", "secret"],
        description="Kinds of text that are replaced by a placeholder such as [EMAIL], before `redaction`.",
    )
    redaction: RedactionSpec | None = Field(default=None, description="Your own redaction; default: none but `mask`.")
    on_secret: Literal["drop", "refuse"] = Field(
        default="drop",
        description="A row that still holds a known kind of secret after redaction is left out and counted, or ends the run.",
    )
    source_field: str | None = Field(
        default=None,
        min_length=1,
        description="Field of a row, with dots (metadata.app), whose value is the slice column `source`; default: the data "
        "set's name.",
    )
    max_rows: int = Field(default=1_000_000, ge=1, description="More rows than this are refused.")
    max_line_mb: float = Field(default=8.0, gt=0, le=64, description="Longer lines are rejected without being held.")

    def to_identity(self) -> dict[str, Any]:
        """Return the options that determine the prompts; limits do not."""
        redaction = None if self.redaction is None else self.redaction.to_identity()
        return {"mask": sorted(set(self.mask)), "redaction": redaction, "source_field": self.source_field} | {
            "on_secret": self.on_secret
        }
