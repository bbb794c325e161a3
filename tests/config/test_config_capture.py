"""Capture options: those that decide the features are in the identity, and contradictory ones are refused."""

from __future__ import annotations

import pytest

from draftworks.capture.engine import make_engine_identity
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.strict_yaml import parse_spec
from draftworks.errors import ConfigError
from draftworks.storage.identity import EngineIdentity

FP8 = ["--quantization", "fp8"]


@pytest.mark.parametrize("backend", ["sglang", "sglang_server", "vllm", "vllm_server"])
def test_what_an_engine_is_told_beside_the_registry_is_part_of_every_key(backend):
    plain = CaptureSpec(backend=backend)
    told = CaptureSpec(backend=backend, server={"args": FP8})
    assert make_engine_identity(plain) == EngineIdentity(f"{plain.software}-bfloat16", 1)
    assert plain.to_identity()["backend"] == {"sglang": "sglang_server", "vllm": "vllm"}[plain.software]
    assert make_engine_identity(told) != make_engine_identity(plain)
    assert told.to_identity() == {**plain.to_identity(), "args": FP8}


def test_settings_of_a_server_that_is_not_used_are_part_of_no_key():
    assert CaptureSpec(server={"args": FP8}).to_identity() == CaptureSpec().to_identity()
    assert make_engine_identity(CaptureSpec(server={"args": FP8})) == make_engine_identity(CaptureSpec())


@pytest.mark.parametrize(
    "args", [["--dtype", "float16"], ["--tp=2"], ["-tp", "2"], ["--log-level", "e", "--port", "1"]]
)
def test_an_argument_that_contradicts_the_registry_is_refused(args):
    with pytest.raises(ConfigError, match=r"capture: server.args: .*-(dtype|tp|port).*: set from other keys"):
        parse_spec(CaptureSpec, {"backend": "sglang", "server": {"args": args}}, where="capture")


@pytest.mark.parametrize(
    ("capture", "gpus"),
    [
        ({"backend": "hf", "server": {"tp_size": 2}}, 1),
        ({"backend": "sglang", "server": {"tp_size": 2}}, 2),
        ({"backend": "vllm", "server": {"tp_size": 2}}, 2),
        ({"backend": "sglang_server", "server": {"tp_size": 2, "replicas": 3}}, 6),
        ({"backend": "sglang_server", "server": {"tp_size": 2, "url": "http://127.0.0.1:30000", "spool": "/s"}}, 1),
    ],
    ids=["hf", "inside", "inside_vllm", "started", "elsewhere"],
)
def test_a_process_uses_the_gpus_of_the_servers_that_it_starts_and_not_of_others(capture, gpus):
    assert CaptureSpec.model_validate(capture).gpus_per_process == gpus
