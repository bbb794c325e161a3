"""YAML files written by hand: reading any content returns a mapping, or raises one line that names the file.

The reader's work is bounded by what it lets through (bytes, depth, nodes), so no test here looks at a clock: without a
bound these files would end the process, or pytest itself would be the one that waits.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from draftworks.config import strict_yaml
from draftworks.config.strict_yaml import MAX_BYTES, MAX_DEPTH, MAX_INTEGER, MAX_NODES, read_mapping
from draftworks.errors import ConfigError

FILL = 1_000_000
NINE = "[{}]".format(",".join(["*{0}"] * 9))


def doubled(kind: str) -> str:
    """Twenty lines of YAML, each of which repeats the one before nine times by aliases."""
    lines = ["a: &a {x: 1}"]
    for number in range(20):
        before, name = chr(97 + number), chr(98 + number)
        repeated = NINE.replace("{0}", before)
        lines.append(f"{name}: &{name} " + (repeated if kind == "list" else f"{{<<: {repeated}}}"))
    return "\n".join(lines)


HOSTILE = {
    "brackets": ("[" * 50_000, "nested deeper than 32"),
    "braces": ("{a: " * 50_000, "nested deeper than 32"),
    "dashes": ("- " * FILL, "larger than 1,024 KiB"),
    "indented": ("".join(" " * depth + "a:\n" for depth in range(MAX_DEPTH + 2)), "nested deeper than 32"),
    "aliases": (doubled("list"), "counting those of an alias"),
    "merges": (doubled("merge"), "counting those of an alias"),
    "itself": ("a: &a [*a]", "refers to a value that contains it"),
    "again itself": ("a: &a 1\nb: &a [*a]", "refers to a value that contains it"),
    "nobody": ("a: *b", "or to no anchor"),
    "wide": ("".join(f"k{key}: 1\n" for key in range(MAX_NODES)), "more than 20,000"),
    "long integer": ("max_length: " + "9" * 5000, "an integer of 5,000 digits"),
    "hexadecimal": ("max_length: 0x" + "f" * 5000, "an integer of 5,002 digits"),
    "above 64 bits": (f"a: {MAX_INTEGER + 1}", "an integer of 19 digits: expected at most 9223372036854775807"),
    "twice": ("a: 1\nb:\n  lr: 1\n  lr: 2\n", "line 4: the key lr is given twice, first in line 3"),
    "twice in flow": ("{a: {b: 1}, c: [2], a: 3}", "the key a is given twice"),
    "merged twice": ("<<: {a: 1}\n<<: {b: 1}", "list what to merge"),
    "date tag": ("a: !!timestamp x", "the tag tag:yaml.org,2002:timestamp is not supported"),
    "python tag": ("a: !!python/object/apply:os.getcwd []", "is not supported"),
    "no integer": ("a: !!int x", "not valid YAML"),
    "no truth": ("a: !!bool x", "not valid YAML"),
    "tags": ("".join(f"%TAG !e{number}! x\n" for number in range(20_000)), "directive %TAG"),
    "zero byte": ("a: b\0c", "not valid YAML"),
    "list as key": ("? [a]\n: b", "unhashable"),
    "two documents": ("a: 1\n---\nb: 2", "single document"),
    "open bracket": ("model: [\n", "line 2, column 1"),
    "list": ("- a", "expected a mapping of keys to values, found a list"),
}


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_one_line_with_its_name(tmp_path: Path, text: str, message: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_mapping(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert message in said
    assert "\n" not in said
    assert len(said) < len(str(path)) + 300


@pytest.mark.parametrize("text", ["[" * 900_000, doubled("list"), "".join(f"k{n}: 1\n" for n in range(90_000))])
def test_no_more_is_looked_at_than_what_may_be_taken(tmp_path: Path, monkeypatch, text: str):
    seen = []

    def watched(text, Loader):
        for event in events(text, Loader=Loader):
            seen.append(event)
            yield event

    events = yaml.parse
    monkeypatch.setattr(strict_yaml.yaml, "parse", watched)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_mapping(path)
    assert len(seen) <= MAX_NODES + 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: ü".encode("utf-16"), "not UTF-8"),
        ("model: ü".encode("latin-1"), r"not UTF-8 at byte 7 \(0xfc\): save it as UTF-8"),
        (b"\xff\xfe\x00junk", "not UTF-8"),
        (b"a" * (MAX_BYTES + 1), "larger than 1,024 KiB"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"mine\.yaml: .*{message}"):
        read_mapping(path)


def test_a_file_far_too_large_is_not_read_whole(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: nothing could hold it
    with pytest.raises(ConfigError, match="larger than"):
        read_mapping(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "device", "loop", "absent"])
def test_what_is_no_file_is_said_to_be_none(tmp_path: Path, kind: str):
    path = tmp_path / "mine.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "absent":
        path.symlink_to({"link": "nowhere", "device": "/dev/zero", "loop": path}[kind])
    expected = {"link": "a link to nowhere, which does not exist", "loop": "symbolic links", "absent": "no such file"}
    with pytest.raises(ConfigError, match=rf"mine\.yaml: .*{expected.get(kind, 'expected a file, found a folder')}"):
        read_mapping(path)


def test_dates_are_text_and_values_are_those_of_yaml(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(
        b"\xef\xbb\xbfdate: 2025-02-30\nreal: 2025-02-28\nwhen: 2025-02-28 10:00:00\nis: =\nnumber: !!str 5\nn: 0x10\nx: 1.5\n"
        b"yes: true\nbase: &base {a: 1, b: 2}\nmade: {<<: *base, b: 3}\nagain: *base\nnone: ~\n"
    )
    found = read_mapping(path)
    assert (found["date"], found["real"], found["when"]) == ("2025-02-30", "2025-02-28", "2025-02-28 10:00:00")
    assert (found["is"], found["number"], found["n"], found["x"], found["none"]) == ("=", "5", 16, 1.5, None)
    assert (found["made"], found["again"]) == ({"a": 1, "b": 3}, {"a": 1, "b": 2})


def test_an_empty_file_holds_nothing(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("# nothing yet\n")
    assert read_mapping(tmp_path / "mine.yaml") == {}


scalars = st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | st.text() | st.dates().map(str)
values = st.recursive(
    scalars | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), values, max_size=5))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, written: dict):
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(yaml.safe_dump(written), encoding="utf-8")
    assert read_mapping(path) == written


@given(st.text(st.sampled_from("[]{}:,-?&*!|>'\"%@`#<~= \n\tab0.x_\x85\u2028"), max_size=60) | st.text(max_size=40))
def test_any_text_is_a_mapping_or_one_line(tmp_path_factory: pytest.TempPathFactory, text: str):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        said = "" if isinstance(read_mapping(path), dict) else "no mapping"
    except ConfigError as error:
        said = str(error).removeprefix(f"{path}: ")
    assert "\n" not in said
    assert str(path) not in said
    assert said != "no mapping"


@pytest.mark.parametrize(("written", "read"), [("0200", "128"), ("2:08", "128"), ("1:30.5", "90.5")])
def test_a_number_that_yaml_reads_in_another_base_is_refused_with_what_it_is(written: str, read: str, tmp_path: Path):
    path = tmp_path / "t.yaml"
    path.write_text(f"max_length: {written}\n")
    with pytest.raises(
        ConfigError, match=rf"line 1: {written} is {read} in YAML: write that, or '{written}' in quotes"
    ):
        read_mapping(path)
    path.write_text(f"max_length: '{written}'\nothers: [0, 0.5, 0x10, 1_000, 10]\n")
    assert read_mapping(path) == {"max_length": written, "others": [0, 0.5, 16, 1000, 10]}
