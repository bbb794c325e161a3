"""The libraries that Draftworks programs need in SGLang's Python are listed, pinned, and checked before a start.
SGLang's internals are imported by one module and the plug-in only, and its Engine by one module.
The platform plug-in for SGLang on a CPU: those parts that need only torch, outside SGLang's environment.
Known limitations of SGLang for a target's family are reported before any expensive work.
"""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.preflight.compatibility import check_requirements
from draftworks.servers.environment import PROGRAM_LIBRARIES
from draftworks.sglang.environment import SGLANG
from draftworks.sglang.layers import list_sglang_remarks
from draftworks.targets.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    "import draftworks.programs.capture, draftworks.programs.regenerate, draftworks.capture.engines.sglang_loading"
)


def make_sglang_python(folder: Path, lacking: str = "") -> Path:
    """A stand-in for SGLang's Python, which prints a version, or the libraries that it lacks."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *version*) echo 0.5.23;; *) echo {lacking};; esac\n')
    python.chmod(0o755)
    return python


def read_pinned() -> set[str]:
    lines = (ROOT / "tools" / "sglang-requirements.txt").read_text().splitlines()
    return {normalise(line.partition("==")[0]) for line in lines if "==" in line}


def normalise(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def read_imported_roots(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_all_that_the_programs_import_is_pinned_for_sglangs_environment():
    script = (
        f"{PROGRAMS}; import sys; print(*[m.__file__ for n, m in sys.modules.items() if n.startswith('draftworks.')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    roots = set().union(*(read_imported_roots(Path(file)) for file in done.stdout.split()))
    distributions = packages_distributions()
    needed = {
        normalise(distributions.get(root, [root])[0]) for root in roots - set(sys.stdlib_module_names) - {"draftworks"}
    }
    assert {"torch", "pyarrow", "dagster-pipes"} <= needed
    assert needed <= read_pinned()


def test_what_sglang_does_not_bring_is_pinned_as_here():
    here = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    there = (ROOT / "tools" / "sglang-requirements.txt").read_text().splitlines()
    assert {f"{name}=={here[name]}" for name in PROGRAM_LIBRARIES.values()} <= set(there)


def test_a_library_that_is_missing_there_is_named_with_the_command_that_installs_it(tmp_path: Path):
    python = make_sglang_python(tmp_path, lacking="pyarrow dagster_pipes")
    with pytest.raises(ConfigError, match=rf"lacks pyarrow, dagster-pipes.*{python} -m pip install --no-deps pyarrow"):
        SGLANG.build_program_environment(python, tmp_path / "package")


def test_a_program_finds_this_package_there_and_nothing_else_of_ours(tmp_path: Path):
    environment = SGLANG.build_program_environment(make_sglang_python(tmp_path), tmp_path / "package")
    assert environment == {"PYTHONPATH": str(tmp_path / "package")}
    (link,) = (tmp_path / "package").iterdir()
    assert link.resolve() == ROOT / "draftworks"


def test_looking_at_the_environment_imports_no_torch():
    script = "import sys, draftworks.sglang.environment; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


INSIDE = {"draftworks/sglang/hook.py"}
USES = {"draftworks/sglang/embedded.py"}
"""The public interface of SGLang: its Engine."""
PLUG_IN = "tools/sglang_cpu_platform"
PACKAGES = ("draftworks", "spec_assets", "resources", "jobs", "sensors", "tools", "benchmarks")
"""Without the tests: a test may use SGLang itself for the expected value."""


def read_imports(path: Path) -> set[str]:
    """Modules by their full names; `from a import b` counts as `a` and as `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return found


def find_importing(package: str) -> set[str]:
    """Files of the project that import a package or something in it, except the plug-in that SGLang itself loads."""
    files = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py") if "build" not in path.parts]
    files = [path for path in files if package in path.read_text()]
    names = {str(path.relative_to(ROOT)): read_imports(path) for path in files}
    return {
        file
        for file, found in names.items()
        if any(f"{name}.".startswith(f"{package}.") for name in found) and not file.startswith(PLUG_IN)
    }


def test_one_module_touches_the_inside_of_sglang():
    assert find_importing("sglang.srt") == INSIDE
    assert find_importing("sglang") == INSIDE | USES


def test_the_hook_needs_nothing_a_serving_environment_lacks():
    script = (
        "import sys, draftworks.sglang.hook;"
        "heavy = {'transformers', 'pyarrow', 'pandas', 'yaml', 'dagster', 'tokenizers', 'httpx', 'tenacity', 'psutil'};"
        "own = {n for n in sys.modules if n.startswith('draftworks.')};"
        "print(sorted(heavy & set(sys.modules)), sorted(own))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    own = ["draftworks.errors", "draftworks.handover", "draftworks.handover.background"]
    own += [
        "draftworks.handover.destination",
        "draftworks.handover.spool",
        "draftworks.sglang",
        "draftworks.sglang.hook",
    ]
    assert done.stdout.strip() == f"[] {own}"


PLUGIN = Path(__file__).resolve().parents[2] / "tools" / "sglang_cpu_platform" / "draftworks_sglang_cpu"


def load(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"plugin_{name}", PLUGIN / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    return load("speculation")


def test_one_copy_of_a_target_is_forked_and_several_are_left_to_sglang(monkeypatch):
    chosen = []
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda method, force: chosen.append((method, force)))
    plugin = load("one_import")
    plugin.choose_fork(None, SimpleNamespace(dp_size=2))
    assert chosen == []
    plugin.choose_fork(None, SimpleNamespace(dp_size=1))
    assert chosen == [("fork", True)]


def test_a_program_that_is_no_server_is_left_alone():
    """SGLang is not installed here: an import of it would fail."""
    load("one_import").register()


def test_cache_locations_are_the_named_span_of_each_requests_row(plugin):
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    found = plugin.cache_locations(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=table,
        start_offset=torch.tensor([3, 1]),
        end_offset=torch.tensor([6, 3]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert found.tolist() == [23, 24, 25, 1, 2]
    assert found.dtype == torch.int64


def test_a_streamless_tensor_takes_no_notice_of_streams_and_makes_plain_ones(plugin):
    lengths = torch.tensor([3, 5])
    with pytest.raises(RuntimeError):
        lengths.record_stream(torch.cpu.current_stream())
    streamless = lengths.as_subclass(plugin.Streamless)
    streamless.record_stream(torch.cpu.current_stream())
    assert type(streamless + 1) is torch.Tensor
    assert (streamless + 1).tolist() == [4, 6]


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)

    def forward(self, positions: torch.Tensor, *, states: torch.Tensor) -> torch.Tensor:
        assert positions.dtype == torch.int64
        return self.linear(states)


def test_a_draft_computes_in_its_own_dtype_whatever_it_is_handed(plugin):
    draft = nn.Module()
    draft.layers = nn.ModuleList([Doubling()])
    states = torch.randn(3, 2)
    plugin.keep_own_dtype(draft)
    found = draft.layers[0](torch.arange(3), states=states.bfloat16())
    assert found.dtype == torch.float32
    assert torch.equal(found, draft.layers[0].linear(states.bfloat16().float()))


MakeTarget = Callable[[str], TargetFiles]
OPTIONS = {"layer_ids": [2, 3, 4], "draft_vocab_size": 64}


def make_spec(files: TargetFiles, backend: str, max_length: int = 128) -> TargetSpec:
    return TargetSpec(
        name="mine", model=files.model, dataset="d", max_length=max_length, strategies={"eagle3": {"options": OPTIONS}},
        capture={"backend": backend, "device": "cpu", "compute_dtype": "float32"},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe"])
@pytest.mark.parametrize("backend", ["sglang", "sglang_server"])
def test_a_family_that_sglang_does_not_run_on_a_cpu_is_refused_there(
    name: str, backend: str, family_target: MakeTarget, tmp_path: Path
):
    files = family_target(name)
    with pytest.raises(ConfigError, match="target mine: .*does not run .* there: .*Set capture.backend to hf"):
        check_requirements(make_spec(files, backend), files, Registry(tmp_path))
    check_requirements(make_spec(files, "hf"), files, Registry(tmp_path))


@pytest.mark.parametrize("name", ["gemma3", "gemma3_text"])
def test_streams_of_gemma_3_are_warned_of_whoever_captures(name: str, family_target: MakeTarget):
    """The warning comes for every capture backend, because SGLang may serve the draft."""
    files = family_target(name)
    [remark] = list_sglang_remarks(make_spec(files, "hf"), files)
    assert "not the residual stream" in remark


def test_a_window_that_sglang_leaves_out_is_told_where_samples_are_longer(family_target: MakeTarget):
    files = family_target("mistral")
    [remark] = list_sglang_remarks(make_spec(files, "sglang_server"), files)
    assert "without its sliding window of 16 tokens, and max_length is 128" in remark
    assert list_sglang_remarks(make_spec(files, "sglang_server", max_length=16), files) == []
    assert list_sglang_remarks(make_spec(files, "hf"), files) == []


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_nothing_is_said_of_families_that_it_runs(name: str, family_target: MakeTarget):
    files = family_target(name)
    assert list_sglang_remarks(make_spec(files, "sglang_server"), files) == []
