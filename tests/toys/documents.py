"""The documents as tests read them: files, fenced blocks, commands, links."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]*)[^\n`]*\n(?P<text>.*?)^ *```", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a block, its words without what it sets in its environment."""

    where: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where} {' '.join(self.words)}"


def documents() -> list[Path]:
    """All that people read, but what is made by the code for a result."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "registry/README.md")]
    return [path for path in top if path.exists()] + sorted((ROOT / "docs").rglob("*.md"))


def blocks(language: str) -> list[Block]:
    return [block for path in documents() for block in _blocks(path) if block.language == language]


def prose(path: Path) -> str:
    """The text without its fenced blocks, line numbers kept."""
    return FENCE.sub(lambda found: "\n" * found.group().count("\n"), path.read_text())


def commands() -> list[Command]:
    """Every command in a block of bash, or in a step of a workflow."""
    found = [command for block in blocks("bash") for command in _commands(str(block), block.text)]
    steps = ((block, re.findall(r"- run: (.+)", block.text)) for block in blocks("yaml"))
    return found + [command for block, lines in steps for line in lines for command in _commands(str(block), line)]


def _blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(path, line, found["language"], textwrap.dedent(found["text"]))


def _commands(where: str, text: str) -> Iterator[Command]:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and ASSIGNMENT.fullmatch(words[0]):
            words.pop(0)
        if words:
            yield Command(where, tuple(words))
