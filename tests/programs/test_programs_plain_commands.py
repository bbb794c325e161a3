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
from draftworks.programs.start import CHECKOUT


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
    ("status", "--registry", "/nowhere"): "error: /nowhere/targets: expected a folder",
    ("status", "tny"): "did you mean tiny?",
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


BY_HAND = {
    "run everything tiny --config nope.yaml": "error: nope.yaml: no such file",
    "run tiny everything": "error: no job 'tiny'; there are: everything",
    "check tny": "targets/tny.yaml: no such file; did you mean tiny?",
    "check tiny --tagret tiny": "error: no option --tagret; did you mean --target?",
    "plan tiny --strategy eagel3": "error: target tiny does not use the strategy 'eagel3'; did you mean eagle3?",
    "plan": "error: missing argument 'TARGET'; usage: ",
    "compare tiny/eagle3": "error: missing argument 'b'; usage: ",
    "compare a b --out x.pdf": "error: --out x.pdf: expected a name that ends in .html or .md",
    "compare tiny/eagle3 tiny/dflash": "error: tiny/eagle3: target tiny has no eagle3 draft yet",
    "export-features tiny out": "error: target tiny has the strategies dflash, eagle3: name one by --strategy",
    "engine tiny": "error: target tiny: capture.server: expected backend sglang_server or vllm_server, url and spool: capture: ",
    "import nope out --target tiny": "error: nope: config.json is missing",
    "import nope out --target tny": "did you mean tiny?",
    "pin tiny eagle3_darft": "error: no asset 'eagle3_darft' was made yet",
    "unpin tiny eagle3_draft abc": "error: no asset 'eagle3_draft' was made yet",
    "accept tiny eagle3": "there is no decision to answer. Run draftworks decide tiny eagle3",
    "decide tiny eagle3": "error: target tiny: has no section `decision`: add one to its entry",
    "promote tiny eagle3": "error: target tiny has no eagle3 draft yet: run draftworks run everything --target tiny",
    "rollback tiny eagle3": "error: target tiny has no eagle3 draft in service: nothing to take back",
    "in-service tiny eagle3": "has no eagle3 draft in service: run draftworks promote tiny eagle3",
    "slices tiny eagle3 --save w.json": "has no eagle3 draft in service: run draftworks promote",
    "observe tiny": "error: target tiny has no servers: add a `servers` section to its entry",
    "observe tiny --for 10": "error: --for: say how often too: --every SECONDS",
    "observe tiny --every -1": "error: --every: expected seconds, more than 0, found -1",
    "release tiny": "error: target tiny is not on hold",
    "notify --tset": "error: no option --tset; did you mean --test?",
    "notify --test": "notifications: no channel; there are: none",
    "usage --jsno": "error: no option --jsno; did you mean --json?",
    "prune --yess": "error: no option --yess; did you mean --yes?",
    "ui --port abc": "error: invalid value for '--port': expected a whole number; usage: ",
    "ui --port 99999": "error: port: expected 1 to 65535, found 99999",
    "doctor --limit 0": "error: invalid value for '--limit': expected a number greater than or equal to 1; usage: ",
    "summary tiny beta": "error: got unexpected extra argument(s) (beta); usage: ",
}
"""Typed by hand on a target of which nothing was made yet."""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    registry = tmp_path_factory.mktemp("project") / "registry"
    for folder in ("targets", "datasets"):
        (registry / folder).mkdir(parents=True)
    (registry / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    (registry / "targets" / "tiny.yaml").write_text(
        f"model: {CHECKOUT / 'registry/models/tiny'}\ndataset: chats\nstrategies: {{eagle3: {{}}, dflash: {{}}}}\n"
    )
    return registry


@pytest.mark.parametrize(("words", "said"), BY_HAND.items(), ids=BY_HAND)
def test_a_mistake_before_anything_is_made_is_one_line_too(words: str, said: str, fresh: Path):
    told = call(*words.split(), "--registry", str(fresh))
    assert told.exit_code != 0
    assert type(told.exception) is SystemExit
    [line] = [line for line in (told.stderr + told.stdout).splitlines() if "error" in line]
    assert said in line
    assert len(line.replace(f"{fresh.parent}/", "")) <= 200


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
