"""Serves a target with a draft by real vLLM, in this process: a judge of judges.py, under vLLM's own Python.

A folder has `asked.json`: the printed command, more of its arguments, prompts and the longest answer. Returns the ids of each
answer and, where `more` asks for it, how many tokens were proposed and accepted in each pass of the target.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.v1.engine.llm_engine import LLMEngine
from vllm_commands import read_command


def serve(asked: dict[str, Any]) -> list[dict[str, Any]]:
    engine = LLMEngine.from_engine_args(read_command(asked["command"], asked["more"]))
    greedy = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
    for index, prompt in enumerate(asked["prompts"]):
        engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompt), greedy)
    answers: dict[str, dict[str, Any]] = {}
    while engine.has_unfinished_requests():
        for request in engine.step():
            if request.finished:
                [output] = request.outputs
                answers[request.request_id] = {"ids": list(output.token_ids)}
                counts = output.spec_decode_metrics
                if counts is not None:
                    passes = {"proposed": counts.per_step_drafted, "accepted": counts.per_step_accepted}
                    answers[request.request_id] |= passes
    return [answers[str(index)] for index in range(len(asked["prompts"]))]


def judge(folders: list[Path], work: Path) -> list[Any]:
    return [serve(json.loads((folder / "asked.json").read_text())) for folder in folders]
