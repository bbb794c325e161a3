"""A GGUF file is dequantised once, by a process of its own, and found by its content: only where somebody pays for it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_files import GgufFile

from draftworks.config.registry_files import TargetSpec
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.programs import convert
from draftworks.storage.identity import FileDigests
from draftworks.targets import gguf_store
from draftworks.targets.gguf_store import NotConvertedError, ensure_converted
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import digest_target_files, identify_inputs, read_shape, resolve_target


@dataclass(frozen=True)
class Site:
    """A registry with GGUF files beside its targets."""

    root: Path

    @property
    def registry(self) -> Registry:
        return Registry(self.root / "registry")

    def write(self, name: str, file: GgufFile) -> Path:
        return file.write(self.root / "registry" / name)

    def load(self, model: str, **entry: Any) -> TargetSpec:
        fields = {"max_length": 96, "strategies": {"eagle3": {}}, **entry}
        return TargetSpec(name="mine", dataset="chats", model=model, **fields)

    def prepare(self, model: str, **entry: Any) -> list[str]:
        said: list[str] = []
        ensure_converted(self.load(model, **entry), self.registry, FileDigests(), said.append)
        return said

    def resolve(self, model: str, **entry: Any):
        return resolve_target(self.load(model, **entry), self.registry, FileDigests())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "registry" / "targets").mkdir(parents=True)
    (tmp_path / "registry" / "deployment.yaml").write_text("var: ../var\n")
    return Site(tmp_path)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Runs the program here, and returns the command lines that would have started it."""
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **options: Any) -> None:
            started.append(command)
            self.stdout: list[str] = []
            try:
                convert.convert(Path(command[-2]), Path(command[-1]), self.stdout.append)
                self.code = 0
            except DraftworksError as error:
                self.stdout.append(f"error: {error}")
                self.code = gguf_store.USER_ERROR

        def wait(self) -> int:
            return self.code

        poll = wait

    monkeypatch.setattr(gguf_store, "subprocess", SimpleNamespace(Popen=Process, PIPE=None, STDOUT=None))
    return started


def test_the_program_is_started_once_for_a_content_whatever_its_name(site: Site, in_this_process: list[list[str]]):
    path = site.write("one.gguf", GgufFile("qwen2"))
    shutil.copy(path, path.with_name("two.gguf"))
    assert site.prepare("one.gguf")[-1] == "dequantised one.gguf"
    assert site.prepare("one.gguf") == site.prepare("two.gguf") == []
    assert len(in_this_process) == 1
    one, two = site.resolve("one.gguf"), site.resolve("two.gguf")
    assert one == two
    assert digest_target_files(one) == one
    assert (one.num_layers, one.hidden_size, one.vocab_size, one.context) == (2, 64, 2048, 128)
    site.write("one.gguf", GgufFile("qwen2", packing="Q8_0"))
    site.prepare("one.gguf")
    assert site.resolve("one.gguf").digest != one.digest


def test_a_real_process_does_it_and_its_progress_is_passed_on(site: Site):
    site.write("model.gguf", GgufFile("qwen2"))
    said = site.prepare("model.gguf")
    assert said[0].startswith("dequantising model.gguf: 27 tensors")
    assert Path(site.resolve("model.gguf").model).parent == site.root / "var" / "gguf"


def test_whoever_may_not_pay_is_told_who_does(site: Site):
    site.write("model.gguf", GgufFile("qwen2"))
    with pytest.raises(
        NotConvertedError, match=r"target mine: model: .*model.gguf is not dequantised yet: .*check --target mine"
    ):
        site.resolve("model.gguf")
    shape = read_shape(site.load("model.gguf"), site.registry)
    assert (shape.num_layers, shape.hidden_size) == (2, 64)
    assert not (site.root / "var").exists()


def test_what_a_sensor_compares_is_the_same_before_and_after(site: Site, in_this_process: list[list[str]]):
    site.write("model.gguf", GgufFile("qwen2"))
    before = identify_inputs(site.load("model.gguf"), site.registry, FileDigests())
    site.prepare("model.gguf")
    assert identify_inputs(site.load("model.gguf"), site.registry, FileDigests()) == before
    site.write("model.gguf", GgufFile("qwen2", packing="Q8_0"))
    assert identify_inputs(site.load("model.gguf"), site.registry, FileDigests()) != before


def test_defaults_fit_the_model_before_it_is_dequantised(site: Site):
    site.write("model.gguf", GgufFile("qwen2"))
    (site.root / "registry" / "targets" / "mine.yaml").write_text("model: model.gguf\ndataset: chats\n")
    assert site.registry.load_target("mine").max_length == 128


def test_another_tokenizer_is_taken_for_a_vocabulary_that_is_not_known(
    site: Site, tiny_folder: Path, in_this_process: list[list[str]]
):
    site.write("model.gguf", GgufFile("qwen2", pre="kimi-k2"))
    with pytest.raises(ConfigError, match="pre 'kimi-k2' is not known here"):
        site.prepare("model.gguf")
    site.prepare("model.gguf", tokenizer=str(tiny_folder))
    assert site.resolve("model.gguf", tokenizer=str(tiny_folder)).tokenizer == str(tiny_folder)
    with pytest.raises(ConfigError, match="pre 'kimi-k2' is not known here"):
        site.prepare("model.gguf")
    assert len(in_this_process) == 1


@pytest.mark.parametrize("change", ["absent", "cut", "package", "disk", "architecture"])
def test_what_is_wrong_is_said_before_anything_is_started(site: Site, monkeypatch: pytest.MonkeyPatch, change: str):
    monkeypatch.setattr(subprocess, "Popen", None)
    more = {"general.architecture": "mamba"} if change == "architecture" else {}
    path = site.write("model.gguf", GgufFile("qwen2", metadata=more))
    causes: dict[str, tuple[Callable[[], object], str]] = {
        "absent": (lambda: path.rename(path.with_name("modell.gguf")), "no such file; did you mean modell.gguf"),
        "cut": (lambda: path.write_bytes(path.read_bytes()[:-5000]), "it is cut. Copy or download it again"),
        "package": (
            lambda: monkeypatch.setattr(gguf_store, "find_spec", lambda name: None),
            r"pip install -e '.\[gguf\]'",
        ),
        "disk": (
            lambda: monkeypatch.setattr(gguf_store.shutil, "disk_usage", few),
            r"takes 0.1 GB .* has 0.0 GB: make room",
        ),
        "architecture": (lambda: None, "architecture 'mamba' is not read from GGUF files, llama, qwen2"),
    }
    bring_about, message = causes[change]
    bring_about()
    with pytest.raises((ConfigError, StoreError), match=message) as told:
        site.prepare("model.gguf")
    assert "\n" not in str(told.value)


def few(path: Path) -> SimpleNamespace:
    return SimpleNamespace(free=1000)


def test_a_program_that_was_killed_leaves_nothing_that_is_taken(site: Site, monkeypatch: pytest.MonkeyPatch):
    site.write("model.gguf", GgufFile("qwen2"))
    monkeypatch.setattr(gguf_store, "PROGRAM", "draftworks.programs.absent")
    with pytest.raises(DraftworksError, match="its dequantisation ended with exit code 1: .*No module named"):
        site.prepare("model.gguf")
    with pytest.raises(NotConvertedError):
        site.resolve("model.gguf")
