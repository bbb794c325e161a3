"""SGLang's internals are imported by one module and the plug-in only, and its Engine by one module."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
    own = ["draftworks.errors", "draftworks.sglang"]
    own += [f"draftworks.sglang.{name}" for name in ("hook", "parts", "spool")]
    assert done.stdout.strip() == f"[] {own}"
