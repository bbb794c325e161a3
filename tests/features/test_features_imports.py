"""The room runs inside a serving engine's environment: it needs torch, numpy, safetensors, pydantic, xxhash and no more."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import pkgutil, sys, importlib, draftworks.features
for module in pkgutil.iter_modules(draftworks.features.__path__):
    importlib.import_module(f"draftworks.features.{module.name}")
heavy = {"transformers", "pyarrow", "pandas", "yaml", "dagster", "tokenizers", "dagster_pipes", "matplotlib"}
own = {name for name in sys.modules if name.startswith("draftworks.")}
allowed = tuple(f"draftworks.{name}" for name in ("features", "errors", "storage", "mooncake"))
print(sorted(heavy & set(sys.modules)), sorted(name for name in own if not name.startswith(allowed)))
"""


def test_features_import_nothing_else():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
