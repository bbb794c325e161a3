"""Strict, bounded reading of YAML files: any invalid or excessive file gives one ConfigError. Torch-free.

PyYAML's own loaders take the last of two equal keys, recurse as deep as the file is nested (in C, until the process
crashes), expand every alias, and construct dates and integers of any length. A first pass over the parser's events,
which does not recurse, refuses equal keys, deep nesting, too many nodes and unusual tags. Only a file that passes it is
composed and constructed, with dates as text and integers of at most 64 bits.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from yaml.events import AliasEvent, Event, MappingStartEvent, NodeEvent, ScalarEvent, SequenceStartEvent

from draftworks.config.base import Beside, PlainErrors, SpecType
from draftworks.errors import ConfigError
from draftworks.storage.words import shorten

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Largest number of keys, values and containers in a file; the nodes of an alias count at each use."""
MAX_INTEGER = 2**63 - 1
_MERGE = "<<"
_MOST = 160
"""Characters of what a message quotes."""
_CORE = "tag:yaml.org,2002:"
_TAGS = {None, "!", *(_CORE + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map"))}
_TAG_DIRECTIVE = re.compile(r"^%TAG\b", re.MULTILINE)
"""The directive is refused: libyaml's time is quadratic in the number of directives."""


class _Refused(Exception):
    """Reason why a file is refused, and its 0-based line."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason)
        self.line = line


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the C loader if PyYAML has it
    """SafeLoader that keeps dates as text and refuses integers beyond 64 bits, which other formats cannot hold."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_CORE) not in ("timestamp", "value")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_SURPRISING = re.compile(r"[-+]?(?:0[0-9_]+|[0-9_]+(?::[0-9]+)+(?:\.[0-9_]*)?)")
"""Numbers that YAML 1.1 reads in base 8 or 60, and people in base 10."""


def _refuse_surprise(node: yaml.ScalarNode, value: float) -> None:
    if _SURPRISING.fullmatch(node.value):
        raise _Refused(
            f"{node.value} is {value} in YAML: write that, or {node.value!r} in quotes", node.start_mark.line
        )


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    value = loader.construct_yaml_float(node)
    _refuse_surprise(node, value)
    return float(value)


def _construct_integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    digits = len(node.value)
    value = loader.construct_yaml_int(node) if digits <= 100 else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise _Refused(f"an integer of {digits:,} digits: expected at most {MAX_INTEGER}", node.start_mark.line)
    _refuse_surprise(node, value)
    return value


_Loader.add_constructor(f"{_CORE}int", _construct_integer)
_Loader.add_constructor(f"{_CORE}float", _construct_float)


def read_mapping(path: Path) -> dict[Any, Any]:
    """Return the mapping in a YAML file; {} for an empty file.

    Raises:
        ConfigError: in one line: not a regular file, larger than `MAX_BYTES`, not UTF-8, not YAML, deeper or larger
            than the limits above, a key given twice, an integer beyond 64 bits, or not a mapping.
    """
    text = _read_text(path)
    try:
        _check_events(text)
        found = yaml.load(text, Loader=_Loader)
    except _Refused as refused:
        raise ConfigError(f"{path}: line {refused.line + 1}: {refused}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_shorten_error(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:  # a tag does not fit its text
        raise ConfigError(f"{path}: not valid YAML: {type(error).__name__}: {shorten(str(error), _MOST)}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found a {type(found).__name__}")
    return found


def _read_text(path: Path) -> str:
    """Return the text of a regular file. Opened without blocking, since a pipe of that name may have no writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path}: expected a file, found a folder, pipe or device")
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        reason = f"a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "no such file"
        raise ConfigError(f"{path}: {reason}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a file, found a folder") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024:,} KiB, the limit for a configuration file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: cannot be read: not UTF-8 at byte {error.start:,} (0x{content[error.start]:02x}): "
            "save it as UTF-8"
        ) from None


@dataclass
class _Container:
    """A mapping or list that is being read.

    Attributes:
        anchor: its YAML anchor, None without one.
        nodes: number of nodes in it so far, itself included.
        lines: the 0-based line of every key of a mapping; None for a list.
        key_next: whether the next node is a key.
    """

    anchor: str | None
    nodes: int = 0
    lines: dict[str, int] | None = None
    key_next: bool = False


@dataclass
class _EventCounter:
    """Counts nodes and checks keys and tags over the events of a file, with a stack of the open containers."""

    open: list[_Container] = field(default_factory=list)
    nodes: int = 0
    nodes_of: dict[str, int] = field(default_factory=dict)
    """Number of nodes of each anchor whose value is complete."""

    def take(self, event: Event) -> None:
        if (tag := getattr(event, "tag", None)) not in _TAGS:
            raise _Refused(
                f"the tag {shorten(str(tag), _MOST)} is not supported: write the value without it", _line_of(event)
            )
        if isinstance(event, MappingStartEvent | SequenceStartEvent):
            self._begin(event)
        elif isinstance(event, ScalarEvent):
            self._take_key(event)
            self._add(1, event)
            if event.anchor is not None:
                self.nodes_of[event.anchor] = 1
        elif isinstance(event, AliasEvent):
            if event.anchor not in self.nodes_of:
                raise _Refused(f"*{event.anchor} refers to a value that contains it, or to no anchor", _line_of(event))
            self._switch_key_value()
            self._add(self.nodes_of[event.anchor], event)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = self.open.pop()
            if done.anchor is not None:
                self.nodes_of[done.anchor] = done.nodes
            if self.open:
                self.open[-1].nodes += done.nodes

    def _begin(self, event: MappingStartEvent | SequenceStartEvent) -> None:
        if len(self.open) == MAX_DEPTH:
            raise _Refused(f"nested deeper than {MAX_DEPTH} levels", _line_of(event))
        self._switch_key_value()
        if event.anchor is not None:
            self.nodes_of.pop(event.anchor, None)  # an anchor name that is used again refers to the new value
        mapping = isinstance(event, MappingStartEvent)
        self.open.append(_Container(event.anchor, lines={} if mapping else None, key_next=mapping))
        self._add(1, event)

    def _add(self, nodes: int, event: Event) -> None:
        if self.open:
            self.open[-1].nodes += nodes
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise _Refused(
                f"more than {MAX_NODES:,} keys and values, counting those of an alias at each use", _line_of(event)
            )

    def _take_key(self, event: ScalarEvent) -> None:
        lines = self.open[-1].lines if self.open and self.open[-1].key_next else None
        if lines is not None:
            if event.value in lines:
                first = lines[event.value] + 1
                advice = "list what to merge: <<: [*a, *b]" if event.value == _MERGE else "leave one of them out"
                raise _Refused(
                    f"the key {shorten(str(event.value), _MOST)} is given twice, first in line {first}: {advice}",
                    _line_of(event),
                )
            lines[event.value] = _line_of(event)
        self._switch_key_value()

    def _switch_key_value(self) -> None:
        """Switch an open mapping between key and value, which alternate."""
        if self.open and self.open[-1].lines is not None:
            self.open[-1].key_next = not self.open[-1].key_next


def _check_events(text: str) -> None:
    directive = _TAG_DIRECTIVE.search(text)
    if directive is not None:
        raise _Refused("the directive %TAG is not supported: remove it", text.count("\n", 0, directive.start()))
    count = _EventCounter()
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, NodeEvent | yaml.CollectionEndEvent):
            count.take(event)


def _line_of(event: Event) -> int:
    return event.start_mark.line


def _shorten_error(error: yaml.YAMLError) -> str:
    """Return PyYAML's message of several lines, with an excerpt of the file, as one line without the excerpt."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    message = ", ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))) or str(error)
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return where + shorten(str(message), _MOST)


def load_yaml(path: Path, model: type[SpecType], beside: Beside = dict, **extra: Any) -> SpecType:
    """Read one registry file into `model`; `extra` adds fields that follow from elsewhere, such as the file's name.

    Raises:
        ConfigError: unreadable file, bad YAML (see `strict_yaml`), unknown key (closest names suggested), bad value, or
            a value in the file that differs from the one in `extra`.
    """
    raw = read_mapping(path)
    given = [key for key in extra if key in raw and raw[key] != extra[key]]
    if given:
        raise ConfigError(f"{path}: {given[0]} follows from the name of the file, {extra[given[0]]}: leave the key out")
    return parse_spec(model, {**raw, **extra}, where=str(path), beside=beside)


def parse_spec(model: type[SpecType], values: dict[str, Any], where: str, beside: Beside = dict) -> SpecType:
    """Return `model(**values)`. Raises one ConfigError for all problems, each line beginning with `where`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, model, where, beside)) from error


def describe_validation_error(error: ValidationError, model: type[BaseModel], where: str, beside: Beside = dict) -> str:
    """Return one line per problem: where, what is wrong, what was found, and what may be meant."""
    plain = PlainErrors(model, where, beside)
    return "\n".join(plain.describe(problem) for problem in error.errors())
