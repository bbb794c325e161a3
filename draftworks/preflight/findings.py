"""Findings of the pre-flight checks of a target, and of an installation. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from draftworks.errors import DraftworksError

Severity = Literal["error", "warning", "note", "ok"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Of problems and facts, in the order in which they are shown."""


@dataclass(frozen=True)
class Finding:
    """One fact. An error would make a run fail or its result useless; a warning is for the user to judge, a note is a
    fact about an entry, and `ok` says that an area of the installation is sound.

    Attributes:
        where: area of the installation, such as `disk` or `dagster`; findings about a target name it in their text.
        remedy: what to do, where the text does not say it.
    """

    severity: Severity
    text: str
    where: str = ""
    remedy: str = ""


@dataclass
class Findings:
    """Collects findings without duplicates."""

    found: list[Finding] = field(default_factory=list)

    def error(self, text: str) -> None:
        self._add(Finding("error", text))

    def warning(self, text: str) -> None:
        self._add(Finding("warning", text))

    def note(self, text: str) -> None:
        self._add(Finding("note", text))

    @contextmanager
    def collect_errors(self) -> Iterator[None]:
        """Record each line of a DraftworksError raised inside the context as an error, and continue after the context."""
        try:
            yield
        except DraftworksError as error:
            for line in str(error).splitlines():
                self.error(line)

    @property
    def errors(self) -> list[str]:
        return [each.text for each in self.found if each.severity == "error"]

    def _add(self, finding: Finding) -> None:
        if finding not in self.found:
            self.found.append(finding)
