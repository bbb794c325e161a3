"""Commands for vLLM are printed by one table of its releases, which is what the wheels of these releases say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from export_toys import FORMATS, Toys
from vllm_wheels import fetch_modules, fetch_package

from draftworks.export.conventions import RELEASES, VllmRelease, is_read, is_served_alone, name_releases
from draftworks.export.export_format import load_format
from draftworks.export.exporting import export_draft

WORKER, COMMANDS = (Path(__file__).with_name(f"vllm_{name}_worker.py") for name in ("config", "commands"))
VLLM = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
OF_SPECULATORS = [name for name in FORMATS if name.startswith("speculators_")]
KEYS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def toys(tmp_path: Path) -> Toys:
    return Toys.make(tmp_path)


def list_vllm_commands(toys: Toys, name: str, local: bool) -> dict[str, str]:
    on_hub = toys.target.model_copy(update={"model": "acme/small", "revision": "0" * 40})
    draft = replace(toys.draft(FORMATS[name]), target=toys.target if local else on_hub)
    commands = load_format(draft.record.strategy, name).build_serve_commands(draft, "DRAFT_FOLDER")
    return {server: command for server, command in commands.items() if command.startswith("vllm")}


def test_the_releases_are_those_that_were_read():
    """`SUPPORTED_SPECULATORS_TYPES` and the refusal of a verifier by path, as in the wheels of 0.32.0 and 0.33.0."""
    types = frozenset({"eagle3", "peagle", "dflash", "dflash2", "dspark"})
    assert (VllmRelease("0.32", types, True), VllmRelease("0.33", types, False)) == RELEASES
    assert name_releases() == "0.32 and 0.33"


@pytest.mark.parametrize("local", [False, True], ids=["on a hub", "in a folder"])
@pytest.mark.parametrize("name", OF_SPECULATORS)
def test_a_command_is_printed_where_every_release_takes_it(toys: Toys, name: str, local: bool):
    kind = name.removeprefix("speculators_")
    commands = list_vllm_commands(toys, name, local)
    assert not commands or is_read(kind)
    assert "vLLM" not in commands or is_served_alone(kind, local)
    assert ("vLLM, target first" in commands) == is_read(kind)


@pytest.mark.parametrize("name", ["speculators_mtp", "speculators_xpress"])
def test_what_vllm_refuses_has_no_command(name: str):
    assert not is_read(name.removeprefix("speculators_"))


def captured_by_vllm(config: dict[str, Any]) -> list[int]:
    """Indices of hidden_states that 0.32 and 0.33 read: `_get_eagle3_aux_layers_from_config` of v1/worker/gpu_model_runner.py
    (the V2 runner takes `layer_ids` of `eagle_config` in place of the last)."""
    return list(config.get(KEYS) or config["eagle_config"][KEYS])


def captured_by_sglang(config: dict[str, Any]) -> list[int]:
    """Those of SGLang 0.5.23: `spec_aux_hidden_state.py` takes `eagle_config` alone, `set_eagle3_layers_to_capture` of
    models/llama.py adds one."""
    return [layer + 1 for layer in config["eagle_config"][KEYS]]


@pytest.mark.parametrize("layers", [[2, 4, 5], [1, 3, 4], [1, 3, 7], [3, 6]])
def test_one_folder_feeds_either_server_the_layers_that_the_draft_was_trained_on(toys: Toys, layers: list[int]):
    """Under one key they mean different layers; a server that takes the other's loads the draft and accepts less."""
    export_draft(toys.draft("eagle3", layer_ids=layers), "sglang_eagle3", toys.folder / "out")
    config = json.loads((toys.folder / "out" / "config.json").read_text())
    assert captured_by_vllm(config) == captured_by_sglang(config) == layers


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_the_table_is_what_the_wheel_says(toys: Toys, release: VllmRelease):
    folders = []
    for name in OF_SPECULATORS:
        folders.append(toys.folder / name)
        export_draft(toys.draft(FORMATS[name]), name, folders[-1])
    package = fetch_modules(release.version, toys.folder)
    asked = subprocess.run([sys.executable, WORKER, package, *folders], check=True, capture_output=True, text=True)
    found = json.loads(asked.stdout.splitlines()[-1])
    assert (set(found["types"]), found["wants_hub"]) == (release.speculators_types, not release.serves_local_verifier)
    for name, made in found["exports"].items():
        kind = name.removeprefix("speculators_")
        assert ("refused" not in made) == (kind in release.speculators_types), (name, made)
        for command in list_vllm_commands(toys, name, local=True).values():
            said = json.loads(command.partition("--speculative-config '")[2].removesuffix("'"))
            assert said["num_speculative_tokens"] == made["asked"]["num_speculative_tokens"]
            assert said["method"] == made["asked"]["method"]


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runner", ["0", "1"], ids=["runner V1", "runner V2"])
def test_the_configuration_of_0_33_takes_every_command(toys: Toys, runner: str):
    """Under 0.32's environment, as 0.33 has no build for CPUs. Each of its runners refuses what the other one serves: on a GPU
    vLLM takes the one that serves it."""
    files = []
    for name in FORMATS:
        draft, folder = toys.draft(FORMATS[name]), toys.folder / name
        commands = load_format(draft.record.strategy, name).build_serve_commands(draft, str(folder))
        printed = [command for command in commands.values() if command.startswith("vllm")]
        if not printed or name == "target_mtp":  # of the target's own checkpoint, which is served live
            continue
        export_draft(draft, name, folder)
        files.append(toys.folder / f"{name}.txt")
        files[-1].write_text(printed[-1])
    package = fetch_package("0.33", toys.folder)
    own = {"PYTHONPATH": str(package), "VLLM_USE_V2_MODEL_RUNNER": runner, "HF_HUB_OFFLINE": "1"}
    env = {**os.environ, **own, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    asked = subprocess.run([VLLM, COMMANDS, *files], env=env, check=True, capture_output=True, text=True)
    found = json.loads(asked.stdout.splitlines()[-1])
    assert len(found) == len(files) > 8
    served = {name: said for name, said in found.items() if f"Model Runner V{int(runner) + 1} does not" not in said}
    assert not [said for said in served.values() if said.startswith("refused")]
    assert {"zlab_dflash", "speculators_dflash", "speculators_eagle3"} <= served.keys()
    assert (served.keys() >= found.keys() - {"speculators_peagle"}) == (runner == "1")
    assert ("speculators_peagle" in served) == (runner == "0")
