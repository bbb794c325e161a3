"""Who knows SGLang from the inside: one module, and the platform plug-in that SGLang itself loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KNOWS_SGLANG = {"draftworks/serving/sglang_hook.py", "tools/sglang_cpu_platform/draftworks_sglang_cpu/platform.py"}
PACKAGES = ("draftworks", "spec_assets", "resources", "jobs", "sensors", "tools", "benchmarks", "tests")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_one_module_touches_the_inside_of_sglang():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "build" not in path.parts]
    knowing = {str(path.relative_to(ROOT)) for path in files if "sglang" in imports(path)}
    assert knowing == KNOWS_SGLANG


def test_the_hook_needs_nothing_a_serving_environment_lacks():
    script = (
        "import sys, draftworks.serving.sglang_hook;"
        "heavy = {'transformers', 'pyarrow', 'pandas', 'yaml', 'dagster', 'tokenizers', 'httpx', 'tenacity', 'psutil'};"
        "own = {n for n in sys.modules if n.startswith('draftworks.')};"
        "print(sorted(heavy & set(sys.modules)), sorted(own))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    own = ["draftworks.errors", "draftworks.serving", "draftworks.serving.sglang_hook", "draftworks.serving.spool"]
    assert done.stdout.strip() == f"[] {own}"
