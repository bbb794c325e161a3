"""The commands that stand in the documents: each is one that its program takes, and those that only look are run."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from documents import ROOT, Command, commands, documents, prose
from typer.testing import CliRunner

from draftworks.programs.cli import app

DRAFTWORKS = typer.main.get_command(app)
PLACEHOLDERS = {"NAME", "tiny", "short"}
"""Targets that the documents speak of."""
LOOKING = {"check", "keys", "leaderboard", "status", "summary"}
"""Commands of `draftworks` that compute nothing."""


def makefile() -> str:
    return (ROOT / "Makefile").read_text()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", makefile(), re.MULTILINE))


def jobs() -> set[str]:
    from spec_assets.definitions import defs

    return {job.name for job in defs.jobs or ()}


def parsed(command: click.Command, words: Sequence[str]) -> list[click.Context]:
    """The contexts of a command and its subcommands; click raises for what it does not take."""
    context = command.make_context(command.name or "", list(words))
    if not isinstance(command, click.Group):
        return [context]
    name, inner, rest = command.resolve_command(context, context._protected_args + context.args)
    assert inner is not None, name
    return [context, *parsed(inner, rest)]


def takes_draftworks(words: Sequence[str]) -> None:
    """Typer brings a click of its own, whose groups are not those of click."""
    context = DRAFTWORKS.make_context("draftworks", list(words[:1]))
    inner = DRAFTWORKS.get_command(context, words[0])
    assert inner is not None, f"no command {words[0]}: there are {DRAFTWORKS.list_commands(context)}"
    given = inner.make_context(words[0], list(words[1:])).params
    if words[0] == "run":
        assert given["job"] in jobs()
    targets = given.get("target")
    assert {targets} - {None} <= PLACEHOLDERS | {"my-model", "my-target"} if isinstance(targets, str) else True


def takes_make(words: Sequence[str]) -> None:
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert re.search(rf"^{name} \?=", makefile(), re.MULTILINE) if is_variable else name in make_targets(), word


def takes_python(words: Sequence[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None or words[1] == "venv", words[1]
        return
    source = (ROOT / words[0]).read_text()
    for option in (word.removeprefix("--") for word in words[1:] if word.startswith("--")):
        assert f"--{option}" in source or re.search(rf"\b{option.replace('-', '_')}\b", source), option


def takes_pip(words: Sequence[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] in ("install", "download")
    for before, word in zip(words, words[1:]):
        if before in ("-r", "-c"):
            assert (ROOT / word).is_file()
        for extras in re.findall(r"\[(.*)\]", word):
            assert set(extras.split(",")) <= known.keys(), extras


def takes_dagster(words: Sequence[str]) -> None:
    from dagster._cli import create_dagster_cli

    given = parsed(create_dagster_cli(), words)[-1].params
    assert given.get("job_name") in (None, *jobs())


def takes_torchrun(words: Sequence[str]) -> None:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(list(words))
    assert given.module
    assert importlib.util.find_spec(given.training_script) is not None


def takes_anything(words: Sequence[str]) -> None:
    """Programs that are not ours."""


TAKERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "draftworks": takes_draftworks,
    "make": takes_make,
    "python": takes_python,
    "pip": takes_pip,
    "dagster": takes_dagster,
    "torchrun": takes_torchrun,
    **dict.fromkeys(("export", "git", "rm", "pre-commit"), takes_anything),
    **dict.fromkeys(("cd", "cp", "install", "ln", "systemctl", "tar", "useradd"), takes_anything),
    **dict.fromkeys(("createdb", "createuser", "pg_dump", "pg_restore", "docker", "helm", "kubectl"), takes_anything),
}


@pytest.mark.parametrize("command", commands(), ids=str)
def test_every_command_is_one_that_its_program_takes(command: Command):
    program, *words = command.words
    if program == "sudo":
        program, *words = words[2:] if words[0] == "-u" else words
    assert Path(program).name in TAKERS, program
    TAKERS[Path(program).name](words)


def test_what_no_program_takes_is_noticed():
    with pytest.raises(click.exceptions.ClickException):
        takes_dagster(["job", "execute", "--nonsense"])
    with pytest.raises(Exception, match="nonsense"):
        takes_draftworks(["check", "--nonsense"])
    for take, words in (
        (takes_make, ["nonsense"]),
        (takes_draftworks, ["run", "nonsense"]),
        (takes_draftworks, ["no"]),
    ):
        with pytest.raises(AssertionError):
            take(words)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_commands_named_in_the_text_exist(path: Path):
    text = prose(path)
    context = click.Context(DRAFTWORKS)
    named = set(re.findall(r"`(?:\.venv/bin/)?draftworks ([a-z][a-z-]*)", text))
    assert named <= set(DRAFTWORKS.list_commands(context))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= make_targets()


@pytest.fixture(scope="module")
def registry(tmp_path_factory) -> Path:
    """A copy, whose results are beside it."""
    folder = tmp_path_factory.mktemp("site") / "registry"
    shutil.copytree(ROOT / "registry", folder, ignore=shutil.ignore_patterns("data", "*.gguf"))
    return folder


def looking() -> list[tuple[str, ...]]:
    """Commands that compute nothing, of the target that is there."""
    ours = (command.words for command in commands() if Path(command.words[0]).name == "draftworks")
    return sorted({words[1:] for words in ours if words[1] in LOOKING and "NAME" not in words})


@pytest.mark.parametrize("words", looking(), ids=" ".join)
def test_commands_that_only_look_work(words: tuple[str, ...], registry: Path):
    place = () if words[0] == "keys" else ("--registry", str(registry))
    result = CliRunner().invoke(app, [*words, *place])
    assert result.exit_code == 0, result.output
    assert result.output.strip()
