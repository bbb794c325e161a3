"""What the judges under vLLM's own Python share: the printed command line, read as `vllm serve` reads it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from vllm import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def read_command(command: str, more: Sequence[str]) -> EngineArgs:
    """Return the engine's arguments of a command line with more words behind it."""
    program, serve, *words = shlex.split(command)
    assert (program, serve) == ("vllm", "serve")
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([*words, *more])
    arguments.model = arguments.model_tag
    return EngineArgs.from_cli_args(arguments)
