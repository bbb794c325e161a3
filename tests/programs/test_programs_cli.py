"""Output of the command line: whole names, and a strategy's own metrics.
The code location that `draftworks run --registry` and `draftworks ui --registry` write.
What a program does not need it does not import: seconds of each start.
`draftworks doctor` as a user calls it: it changes nothing, shows no secret, and ends with 1 where a problem is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dagster._core.code_pointer import FileCodePointer
from dagster._core.workspace.load import location_origins_from_yaml_paths
from draft_run_files import TRAINING, RunFiles
from model_families import DRAFT_OPTIONS
from retention_toys import make_result
from typer.testing import CliRunner

from draftworks.config.run_files import TargetFiles
from draftworks.evaluation.report.text_tables import render_text_table
from draftworks.preflight.findings import Finding
from draftworks.preflight.installation.doctor import Installation, probe_ui_port
from draftworks.programs.cli import COMMANDS, LazyCommand, app
from draftworks.programs.code_location import write_code_location
from draftworks.programs.keys import list_keys
from draftworks.programs.start import CHECKOUT
from draftworks.programs.summary import build_sampled_table, build_strategy_metrics_table
from draftworks.storage.artifacts import Artifact
from draftworks.targets.registry import Registry

HEAVY = [
    "torch",
    "numpy",
    "dagster",
    "transformers",
    "pyarrow",
    "httpx",
    "yaml",
    "draftworks.config",
    "draftworks.targets",
]
"""Nothing of these is needed to say what there is."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_all_commands_says_of_each_what_its_own_begins_with(name):
    command = LazyCommand(name, COMMANDS[name]).load()
    assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name].help


def test_help_and_unknown_commands_import_none_of_what_commands_need():
    code = (
        "import sys; from typer.testing import CliRunner; from draftworks.programs.cli import app\n"
        "for words, code in ((['--help'], 0), (['run', '--help'], 0), (['targets'], 2)):\n"
        "    assert CliRunner().invoke(app, words).exit_code == code, words\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_key_is_cut_off_where_the_output_goes_into_a_file():
    words = CliRunner().invoke(app, ["keys"]).stdout.split()
    assert [key.name for key in list_keys("target") if key.name not in words] == []


def test_figures_that_a_strategy_has_alone_stand_beside_their_names():
    heldout = {"eval/avg_acc": 0.9, "eval/tau": 0.25, "eval/confidence_error": [0.125, 0.5]}
    draft = Artifact(
        "dspark_draft", "small", Path("draft"), {}, "v", {"heldout": heldout}, {}, created=0.0, seconds=0.0
    )
    shown = render_text_table(build_strategy_metrics_table("dspark", draft))
    lines = [line.split() for line in shown.splitlines()]
    assert ["sampled_acceptance_length", "1.250"] in lines
    assert ["confidence_error", "0.125", "0.500"] in lines
    assert not any("avg_acc" in line for line in lines)
    assert "rejection at temperature 1 (SGLang 0.5.23)" in " ".join(shown.split())


def test_acceptance_above_temperature_0_is_shown_with_rule_and_servers_side_by_side():
    metrics = {
        "eval/simulated_acc_len": 0.8,
        "eval/simulated_acc_len_t0.7_greedy_draft": 0.5,
        "eval/rung4_loop_t0.7_greedy_draft_acc_len": 0.25,
        "eval/simulated_acc_len_t0.7_rejection": 0.75,
    }
    summary = {"drafts": {"trained": metrics}}
    report = Artifact("dspark_report", "small", Path("report"), {}, "v", summary, {}, created=0.0, seconds=0.0)
    rows = build_sampled_table("dspark", report).rows
    assert rows == (
        ("temperature 0.7", "greedy_draft", "vLLM 0.33", "1.500", "1.250"),
        ("temperature 0.7", "rejection", "SGLang 0.5.23", "1.750", ""),
    )


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    root = tmp_path / 'it\'s \\\\ "ours" {x}' / "fleet"
    (root / "targets").mkdir(parents=True)
    (root / "targets" / "small.yaml").write_text("model: /nowhere\ndataset: chats\n")
    return Registry(root)


def test_dagster_finds_the_targets_of_the_folder(registry: Registry):
    location = write_code_location(registry, CHECKOUT)
    assert location.definitions.is_relative_to(registry.resolve_var_folder())
    definitions = FileCodePointer(str(location.definitions), "defs", None).load_target()
    [target_model] = [each for each in definitions.resolve_all_asset_specs() if each.key.path == ["target_model"]]
    assert target_model.partitions_def.get_partition_keys() == ["small"]


def test_the_checkouts_own_registry_is_not_read(registry: Registry, monkeypatch):
    monkeypatch.delitem(sys.modules, "spec_assets.definitions", raising=False)
    location = write_code_location(registry, CHECKOUT)
    FileCodePointer(str(location.definitions), "defs", None).load_target()
    assert "spec_assets.definitions" not in sys.modules


def test_the_ui_shows_the_location_by_the_name_of_the_folder(registry: Registry):
    location = write_code_location(registry, CHECKOUT)
    [origin] = location_origins_from_yaml_paths([str(location.workspace)])
    assert origin.location_name == "fleet"
    assert Path(origin.loadable_target_origin.python_file) == location.definitions
    assert origin.loadable_target_origin.working_directory == str(CHECKOUT)


def test_a_location_that_is_there_is_not_written_again(registry: Registry):
    location = write_code_location(registry, CHECKOUT)
    before = [path.stat().st_mtime_ns for path in (location.definitions, location.workspace)]
    again = write_code_location(registry, CHECKOUT)
    assert [path.stat().st_mtime_ns for path in (again.definitions, again.workspace)] == before


SEVERAL_RANKS = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
COMPILERS = ["sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch._inductor"]
ELSEWHERE = ["transformers", "pandas", "dagster", "httpx"]
STRATEGIES = ["eagle3", "peagle", "domino", "lilicorr"]
"""With every kind of layer that drafts have: unrolled and masked attention, an embedding, a GRU, a lattice."""
TRAIN = """
import json, sys
from pathlib import Path
from draftworks.config.run_files import TrainRun
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train

for name in sys.argv[2:]:
    train(TrainRun.load(Path(name)), ProgramContext())
    print("imported", name, *(module for module in json.loads(sys.argv[1]) if module in sys.modules))
from draftworks.data.chat import ChatTokenizer

ChatTokenizer.load(TrainRun.load(Path(name)).target)
print("imported tokenizer", *(module for module in json.loads(sys.argv[1]) if module in sys.modules))
"""


def test_a_training_of_one_rank_imports_neither_what_several_need_nor_compilers(
    tmp_path: Path, tiny_target: TargetFiles
) -> None:
    """From its run file to checkpoints, draft and picture; and at last a tokenizer, which takes no class of a model."""
    files, training = RunFiles.make(tmp_path, tiny_target), TRAINING.model_copy(update={"max_steps": 2})
    paths = []
    for name in STRATEGIES:
        options = {**DRAFT_OPTIONS[name], "layer_ids": [2, 4, 5]}
        run = files.train_run(strategy=name, options=options, training=training, out=tmp_path / name)
        paths.append(str(run.save(tmp_path / f"{name}.yaml")))
    names = json.dumps(SEVERAL_RANKS + COMPILERS + ELSEWHERE)
    done = subprocess.run([sys.executable, "-c", TRAIN, names, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("imported ")]
    assert found == [*(f"imported {path}" for path in paths), "imported tokenizer transformers"]
    assert all(any((tmp_path / name / "checkpoints").iterdir()) for name in STRATEGIES)


SECRET = "hunter2-and-more"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry with results, and an instance whose database needs a password and is not there."""
    for folder in ("targets", "datasets"):
        (tmp_path / "registry" / folder).mkdir(parents=True)
    (tmp_path / "registry" / "targets" / "a.yaml").write_text("model: m\ndataset: d\n")
    make_result(tmp_path / "var", "x_draft")
    (tmp_path / "home").mkdir()
    url = f"postgresql://me:{SECRET}@127.0.0.1:1/db"
    (tmp_path / "home" / "dagster.yaml").write_text(f"storage: {{postgres: {{postgres_url: '{url}'}}}}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def list_tree(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def test_it_changes_nothing_and_shows_no_secret(site: Path):
    before = list_tree(site)
    code = (
        "import sys; from typer.testing import CliRunner; from draftworks.programs.cli import app; "
        "done = CliRunner().invoke(app, sys.argv[1:]); sys.stdout.write(done.stdout); "
        "assert 'torch' not in sys.modules; sys.exit(done.exit_code)"
    )
    words = ["doctor", "--json", "--limit", "60", "--registry", str(site / "registry")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == sum(line["severity"] == "error" for line in found["lines"]) > 0
    areas = {line["where"] for line in found["lines"]}
    assert areas >= {
        "versions",
        "disk",
        "permissions",
        "gpu",
        "sglang",
        "dagster",
        "clocks",
        "secrets",
        "ports",
        "stores",
    }
    assert all(line["remedy"] for line in found["lines"] if line["severity"] == "error")
    assert SECRET not in done.stdout + done.stderr
    assert list_tree(site) == before


def test_the_exit_code_is_that_of_the_worst_line(site: Path, monkeypatch: pytest.MonkeyPatch):
    for state, code in (("ok", 0), ("warning", 0), ("error", 1)):
        line = Finding(state, "one\ntwo", "disk", "mend it")
        monkeypatch.setattr(Installation, "examine", lambda self, limit, line=line: [line])
        done = CliRunner().invoke(app, ["doctor", "--registry", str(site / "registry")])
        assert done.exit_code == code
        assert f"{state:<7}  disk: one" in done.stdout
        assert "-> mend it" in done.stdout


def test_a_port_in_use_is_a_warning_with_another_one():
    assert [line.severity for line in probe_ui_port(1, True, "127.0.0.1")] == ["ok"]
    [line] = probe_ui_port(1, False, "127.0.0.1")
    assert (line.severity, line.remedy) == ("warning", "draftworks ui --port 2")
