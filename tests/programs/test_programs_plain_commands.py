"""The command line as people expect it: names by place or option, one line for a mistake, help by -h, no time wasted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftworks.errors import StoreError
from draftworks.programs import summary
from draftworks.programs.cli import COMMANDS, LazyCommand, app
from draftworks.programs.code_location import list_jobs


def call(*words: str) -> Result:
    return CliRunner().invoke(app, words)


MISTAKES = {
    ("chekc",): "error: no command 'chekc'; did you mean check?",
    ("validate",): "error: no command 'validate'; did you mean check?",
    ("in_service", "tiny", "eagle3"): "error: no command 'in_service'; did you mean in-service?",
    ("xyzzy",): "error: no command 'xyzzy'; all are listed by ",
    ("run", "everyting"): "error: no job 'everyting'; did you mean everything?",
    ("run", "train_egle3", "tiny"): "error: no job 'train_egle3'; did you mean train_eagle3",
    (
        "run",
        "everything",
    ): "error: everything works on one target, and none is given: draftworks run everything --target tiny",
    ("run", "everything", "tny"): "error: registry/targets/tny.yaml: no such file; did you mean tiny?",
    ("run", "everything", "--traget", "tiny"): "error: no option --traget; did you mean --target?",
    ("keys", "targt"): "error: 'targt' is no registry file; did you mean target?",
    ("promote", "tiny"): "error: missing argument 'strategy'; usage: ",
    ("promote", "tiny", "eagel3"): "error: target tiny does not use 'eagel3'; did you mean eagle3?",
    ("rollback", "tiny", "eagel3"): "error: target tiny does not use 'eagel3'; did you mean eagle3?",
    ("in-service", "tiny", "eagel3"): "error: target tiny does not use 'eagel3'; did you mean eagle3?",
    ("decide", "tiny", "eagel3"): "error: target tiny does not use 'eagel3'; did you mean eagle3?",
    ("accept", "tiny", "eagel3"): "error: target tiny does not use 'eagel3'; did you mean eagle3?",
    ("slices", "tiny", "eagel3"): "error: target tiny does not use eagel3; did you mean eagle3?",
    ("accept", "tiny", "eagle3", "--choice", "retran"): "found 'retran'; did you mean retrain?",
    ("export-features", "tiny", "x", "--strategy", "eagel3"): "did you mean eagle3?",
    ("observe", "tiny", "--every", "often"): "error: invalid value for '--every': expected a number; usage: ",
    **{(name, "tny"): "did you mean tiny?" for name in ("plan", "summary", "observe", "hold", "release", "engine")},
    ("leaderboard", "--registry", "/nowhere"): "error: /nowhere/targets: expected a folder",
}


@pytest.mark.parametrize(("words", "said"), MISTAKES.items(), ids=" ".join)
def test_a_mistake_is_one_line_that_says_what_may_be_meant(words: tuple[str, ...], said: str):
    told = call(*words)
    assert told.exit_code != 0
    assert type(told.exception) is SystemExit
    [line] = told.stderr.splitlines()
    assert said in line
    assert line.startswith("error: ")
    assert len(line) <= 200


@pytest.mark.parametrize("name", COMMANDS)
def test_short_help_works_everywhere_and_flags_show_no_type(name: str):
    short, long = call(name, "-h"), call(name, "--help")
    assert short.exit_code == 0
    assert short.stdout == long.stdout
    assert "<bool>" not in short.stdout


def test_the_help_of_all_has_every_command_under_a_heading():
    told = call("-h").stdout
    assert all(f"─ {place.panel} ─" in told for place in COMMANDS.values())
    assert len({place.panel for place in COMMANDS.values()}) > 3
    assert call("--version").stdout.strip() == "0.1.0"


@pytest.mark.parametrize(
    "words",
    [
        ("decide", "tiny", "eagle3"),
        ("decide", "--target", "tiny", "eagle3"),
        ("decide", "tiny", "--strategy", "eagle3"),
        ("decide", "--strategy=eagle3", "-t", "tiny", "--dry-run"),
        ("decide", "tiny/eagle3"),
        ("decide", "--dry-run", "tiny", "-s", "eagle3"),
    ],
)
def test_target_and_strategy_are_taken_by_place_and_by_option(words: tuple[str, ...]):
    command = LazyCommand(words[0], COMMANDS[words[0]])
    context = command.make_context(words[0], list(words[1:]))
    assert (context.params["target"], context.params["strategy"]) == ("tiny", "eagle3")
    assert context.params["dry_run"] == ("--dry-run" in words)


def test_several_targets_are_taken_by_option_too():
    context = LazyCommand("plan", COMMANDS["plan"]).make_context("plan", ["--target", "a", "b", "-t", "c", "--json"])
    assert sorted(context.params["targets"]) == ["a", "b", "c"]


def test_whatever_a_person_can_put_right_is_never_a_traceback(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise StoreError("a record is damaged")

    monkeypatch.setattr(summary.Fleet, "of", fail)
    monkeypatch.setattr(summary, "report_error", lambda error: error)  # as a command that forgot to catch it
    told = call("leaderboard")
    assert (told.exit_code, told.stderr) == (1, "error: a record is damaged\n")


def test_jobs_are_known_by_the_names_that_they_have(tmp_path: Path):
    """Of one target with every section."""
    from spec_assets.code_location import build_definitions

    for folder in ("targets", "datasets"):
        (tmp_path / folder).mkdir()
    (tmp_path / "targets" / "one.yaml").write_text(
        "model: m\ndataset: d\nstrategies: {eagle3: {}, dflash: {}}\nservice: {}\ndecision: {}\n"
        "servers: [{name: a, url: 'http://127.0.0.1:1', kind: sglang, strategy: eagle3}]\n"
    )
    definitions = build_definitions(tmp_path)
    made = {job.name for job in definitions.resolve_all_job_defs() if not job.name.startswith("__")}
    assert made == set(list_jobs(["eagle3", "dflash"]))


@pytest.mark.parametrize("words", [("--help",), ("run", "--help"), ("chekc",)])
def test_what_needs_nothing_starts_fast(words: tuple[str, ...]):
    """By what it imports, as the time depends on the machine: `typer` alone is most of it."""
    code = (
        "import sys; from typer.testing import CliRunner; from draftworks.programs.cli import app\n"
        f"CliRunner().invoke(app, {list(words)}); print(len([n for n in sys.modules if n.startswith('draftworks.')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20
