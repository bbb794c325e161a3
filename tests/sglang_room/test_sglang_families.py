"""Known limitations of SGLang for a target's family are reported before any expensive work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.preflight.compatibility import check_requirements
from draftworks.sglang.layers import list_sglang_remarks
from draftworks.targets.registry import Registry

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
