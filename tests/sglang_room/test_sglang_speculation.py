"""A draft in a server: the arguments are those of the serving command that the export writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftworks.errors import ConfigError
from draftworks.sglang.server import ServerOptions
from draftworks.sglang.speculation import Speculation

EAGLE3 = (
    "python -m sglang.launch_server --model-path models/toy --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path HERE --speculative-num-steps 5 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 6"
)
DFLASH = (
    "python -m sglang.launch_server --model-path models/toy --speculative-algorithm DFLASH "
    "--speculative-draft-model-path HERE"
)
DSPARK = DFLASH.replace("DFLASH", "DSPARK")
OPTIONS = ServerOptions(
    model="models/toy", revision=None, tokenizer="models/toy", context=512, dtype="float32", device="cpu",
    layer_ids=(), spool=Path("spool"),
)  # fmt: skip


def parse_speculation(command: str) -> Speculation:
    return Speculation.of_command(command, "HERE", Path("/exports/a draft"))


def find_value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


@pytest.mark.parametrize("command", [EAGLE3, DFLASH, DSPARK])
def test_the_server_gets_what_the_command_says(command: str):
    words = replace(OPTIONS, draft=parse_speculation(command)).build_arguments(port=1)
    parts = command.replace("HERE", "/exports/a draft").split(" --")
    for part in parts:
        if part.startswith("speculative-"):
            option, expected = part.split(" ", 1)
            assert find_value(words, f"--{option}") == expected
    assert words.count("--model-path") == 1
    assert "--enable-metrics" in words


def test_a_chain_proposes_as_many_tokens_as_are_asked_for_and_a_block_what_it_was_made_for():
    chain = parse_speculation(EAGLE3).with_draft_tokens(3).build_arguments("cuda")
    assert (find_value(chain, "--speculative-num-steps"), find_value(chain, "--speculative-num-draft-tokens")) == (
        "3",
        "4",
    )
    assert find_value(chain, "--speculative-eagle-topk") == "1"
    assert parse_speculation(DFLASH).with_draft_tokens(3) == parse_speculation(DFLASH)


def test_on_a_cpu_tritons_kernels_are_interpreted_and_on_a_gpu_nothing_is_chosen_for_the_server():
    on_cpu = replace(OPTIONS, draft=parse_speculation(EAGLE3))
    assert find_value(on_cpu.build_arguments(1), "--attention-backend") == "triton"
    assert on_cpu.build_environment()["TRITON_INTERPRET"] == "1"
    on_gpu = replace(on_cpu, device="cuda")
    assert "--attention-backend" not in on_gpu.build_arguments(1)
    assert "TRITON_INTERPRET" not in on_gpu.build_environment()
    assert "TRITON_INTERPRET" not in OPTIONS.build_environment()


def test_a_server_does_not_capture_and_speculate_at_once():
    with pytest.raises(ConfigError, match="not both"):
        replace(OPTIONS, layer_ids=(1,), draft=parse_speculation(EAGLE3))


def test_copies_of_the_target_in_one_server_have_gpus_of_their_own():
    copies = replace(OPTIONS, tp_size=2, dp_size=3)
    assert find_value(copies.build_arguments(1), "--dp-size") == "3"
    assert copies.gpus == 6
    assert "--dp-size" not in OPTIONS.build_arguments(1)


def test_a_command_without_a_draft_is_refused():
    with pytest.raises(ConfigError, match="expected --speculative-algorithm and --speculative-draft-model-path"):
        parse_speculation("vllm serve HERE")


@pytest.mark.parametrize(("command", "device"), [(EAGLE3, "cpu"), (DFLASH, "cpu"), (DSPARK, "cuda")])
def test_what_sglang_can_serve_on_a_device_is_let_through(command: str, device: str):
    parse_speculation(command).require_supported(device)


def test_what_sglang_does_not_serve_on_a_cpu_is_refused_before_a_server_starts():
    with pytest.raises(ConfigError, match=r"--speculative-algorithm DSPARK on a CPU: expected one of .*EAGLE3, DFLASH"):
        parse_speculation(DSPARK).require_supported("cpu")
