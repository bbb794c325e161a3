"""The architectures that vLLM captures are those whose class says so in the sources that are installed."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from draftworks.vllm.models import CAPTURED

pytestmark = pytest.mark.vllm

[ROOT] = (Path(__file__).resolve().parents[2] / ".venv-vllm" / "lib").glob("python*/site-packages")
MODELS = ROOT / "vllm" / "model_executor" / "models"


def locate(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])


def list_captured() -> set[str]:
    """The text models and wrappers of vLLM's registry, which names a module and a class for each architecture."""
    found = set()
    for node in ast.walk(parse(MODELS / "registry.py")):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "_TEXT_GENERATION_MODELS",
            "_MULTIMODAL_MODELS",
        ):
            for architecture, (module, name) in ast.literal_eval(node.value).items():
                full = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
                if is_captured(locate(full), name):
                    found.add(architecture)
    return found


@cache
def is_captured(path: Path, name: str) -> bool:
    """Whether a class has SupportsEagle3 among its bases, or those of its bases."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
            return "SupportsEagle3" in bases or any(is_captured(path, base) for base in bases if base != name)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return is_captured(resolve(path, node), alias.name)
    return False


def resolve(path: Path, node: ast.ImportFrom) -> Path:
    if not node.level:
        return locate(node.module or "")
    package = path.parents[node.level - 1].relative_to(ROOT).as_posix().replace("/", ".")
    return locate(f"{package}.{node.module}")


def test_the_table_is_that_of_the_sources():
    ends = ("ForCausalLM", "ForConditionalGeneration")
    assert {name for name in list_captured() if name.endswith(ends)} == CAPTURED
