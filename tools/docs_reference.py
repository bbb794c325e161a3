"""Generates docs/reference/ from the code: `python -m tools.docs_reference`; `--check` lists the outdated pages.

Registry keys come from the types that validate them, commands from the typer app, assets from the code location.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
WIDTH = 118
NOTE = "<!-- Made by `make reference` from the code. Change it there. -->"
ANY_STRATEGY = "NAME"
"""Replaces the strategy in keys that all strategies have."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/reference/ from the code.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a page differs from the code"
    )
    check = parser.parse_args().check
    stale = find_stale_pages()
    for name in stale:
        print(f"docs/reference/{name}: {'differs from the code: run make reference' if check else 'written'}")
        if not check:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / name).write_text(render_pages()[name])
    return int(check and bool(stale))


def find_stale_pages() -> list[str]:
    """Return the names of the pages that are missing or differ from the code."""
    return [name for name, text in render_pages().items() if _read_text(FOLDER / name) != text]


def render_pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    made = {"registry.md": render_registry_page(), "cli.md": render_cli_page(), "assets.md": render_assets_page()}
    return {name: "\n".join(lines) + "\n" for name, lines in made.items()}


def _read_text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def render_registry_page() -> list[str]:
    """Render the page of registry keys: a section for each file and each group of keys in it."""
    from draftworks.programs.keys import FILES, Key, list_keys

    lines = ["# Registry keys", "", NOTE, ""]
    lines += _wrap(
        "Every key that a file in `registry/` may have: its type, its default and its meaning. An unknown key is refused, with "
        "the closest known one. `draftworks keys target` (or `dataset`, `eval`, `deployment`) prints the same."
    )
    places = {
        "target": "registry/targets/NAME.yaml",
        "dataset": "registry/datasets/NAME.yaml",
        "eval": "registry/evals/NAME.yaml",
        "deployment": "registry/deployment.yaml",
    }
    for file in FILES:
        lines += ["", f"## {places[file]}"]
        sections: dict[str, list[Key]] = {}
        for key in list_keys(file):
            sections.setdefault(_find_section(key.name), []).append(_generalize_key(key))
        for section, keys in sections.items():
            lines += ["", f"### {section}", ""] if section else [""]
            lines += [line for key in dict.fromkeys(keys) for line in _render_key(key)]
    return lines


def _find_section(key: str) -> str:
    """Return the section of a key: `capture` for `capture.server.url`; a strategy's options have a section each."""
    parts = key.split(".")
    if parts[0] == "strategies":
        return f"strategies.{parts[1]}.options" if parts[2] == "options" else f"strategies.{ANY_STRATEGY}"
    return parts[0] if len(parts) > 1 else ""


def _generalize_key(key: Any) -> Any:
    parts = key.name.split(".")
    if parts[0] == "strategies" and parts[2] != "options":
        parts[1] = ANY_STRATEGY
    return key._replace(name=".".join(parts))


def _render_key(key: Any) -> list[str]:
    value = "required" if key.default == "required" else f"default `{key.default}`" if key.default else "default empty"
    meaning = f": {key.meaning}" if key.meaning else ""
    return _wrap(f"* `{key.name}` ({key.type.replace('typing.', '')}; {value}){meaning}")


def render_cli_page() -> list[str]:
    """Render the page of commands with their arguments and options."""
    from typer import Context
    from typer.core import TyperGroup
    from typer.main import get_command

    from draftworks.programs.cli import LazyCommand, app

    command = get_command(app)
    assert isinstance(command, TyperGroup)  # it has several commands
    context = Context(command, info_name="draftworks")
    lines = ["# Command line", "", NOTE, ""]
    lines += _wrap(
        "In a checkout the command is `.venv/bin/draftworks`. Exit code 0 is success; otherwise the last lines say what was "
        "wrong and what to do."
    )
    for name in command.list_commands(context):
        listed = command.commands[name]
        assert isinstance(listed, LazyCommand)
        each = listed.load()
        words = " ".join(word for parameter in each.params for word in _render_usage(parameter))
        usage = textwrap.wrap(
            f"draftworks {name} {words}",
            WIDTH,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += ["", f"## draftworks {name}", "", "```text", *usage, "```", ""]
        lines += [line for paragraph in (each.help or "").split("\n\n") for line in [*_wrap(paragraph), ""]]
        for parameter in each.params:
            lines += _wrap(
                f"* {_render_names(parameter)}: {getattr(parameter, 'help', None) or 'required.'}{_render_default(parameter)}"
            )
    return lines


def _render_usage(parameter: Any) -> Iterator[str]:
    if parameter.param_type_name == "argument":
        yield parameter.name.upper() if parameter.required else f"[{parameter.name.upper()}]"
    elif parameter.required:
        yield f"{parameter.opts[0]} {parameter.name.upper()}"
    else:
        yield f"[{parameter.opts[0]}{'' if parameter.is_flag else ' ' + parameter.name.upper()}]"


def _render_names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{option}`" for option in parameter.opts)


def _render_default(parameter: Any) -> str:
    value = parameter.default
    if value in (None, False, (), []) or callable(value):
        return ""
    stop = "" if (parameter.help or ".").endswith(".") else "."
    return f"{stop} Default `{str(value).replace(f'{ROOT}/', '')}`."


def render_assets_page() -> list[str]:
    """Render the page of assets, jobs and sensors; what every strategy has is listed once."""
    import dagster as dg

    from spec_assets.definitions import defs

    graph = defs.resolve_asset_graph()
    groups: dict[str, dict[str, list[str]]] = {}
    for key in sorted(graph.get_all_asset_keys(), key=dg.AssetKey.to_user_string):
        node = graph.get(key)
        template = StrategyTemplate.of(key.to_user_string())
        reads = sorted({template.name(parent.to_user_string()) for parent in node.parent_keys})
        checks = sorted({check.name for check in node.check_keys})
        text = [
            f"* `{template.name(key.to_user_string())}`: {template.text(' '.join((node.description or '').split()))}"
        ]
        text += [f"Reads {_render_list(reads)}."] if reads else []
        text += [f"Checks: {_render_list(checks)}."] if checks else []
        groups.setdefault(node.group_name, {}).setdefault(template.name(key.to_user_string()), text)
    lines = ["# Assets, jobs, sensors", "", NOTE, ""]
    lines += _wrap(
        "Every asset but `leaderboard` is partitioned by target. `{strategy}` stands for each strategy; eval sets of your own "
        "(`registry/evals/`) add assets named after them, as `heldout` has. A target that does not use a strategy has none of "
        "its assets."
    )
    for group in sorted(groups, key=ORDER.index):
        lines += ["", f"## Group {group}", ""]
        lines += [line for text in groups[group].values() for line in _wrap(" ".join(text))]
    lines += ["", "## Jobs", ""]
    jobs = {StrategyTemplate.of(job.name).name(job.name): job for job in defs.jobs or ()}
    lines += [
        line
        for name, job in jobs.items()
        for line in _wrap(f"* `{name}`: {StrategyTemplate.of(job.name).text(job.description or '')}")
    ]
    lines += ["", "## Sensors", ""]
    lines += [line for each in defs.sensors or () for line in _wrap(f"* `{each.name}`: {each.description}")]
    lines += [""]
    return lines + _wrap(
        "And a schedule of the job `evaluate` for each different `evaluation.cron` of the targets. `automation: true` in "
        "`registry/deployment.yaml` switches these and `reevaluation_sensor` on; a switch in the UI counts before it."
    )


ORDER = ["inputs", "data", "features", "gates", "drafts", "reports", "exports", "serving", "service", "fleet"]


class StrategyTemplate:
    """Replaces a strategy in names and descriptions by `{strategy}`, so that each text appears once for all of them."""

    def __init__(self, strategy: Any = None) -> None:
        self._strategy = strategy

    @classmethod
    def of(cls, name: str) -> StrategyTemplate:
        from draftworks.config.strategies import list_strategies, resolve_strategy

        words = name.split("_")
        return cls(next((resolve_strategy(one) for one in list_strategies() if one in words), None))

    def name(self, text: str) -> str:
        from draftworks.config.strategies import list_strategies

        words = text.split("_")
        return "_".join("{strategy}" if word in list_strategies() else word for word in words)

    def text(self, text: str) -> str:
        if self._strategy is None:
            return text
        formats = ", ".join(export.name for export in self._strategy.exports)
        text = text.replace(self._strategy.description, "").replace(f": {formats}", "" if formats else f": {formats}")
        return text.replace(self._strategy.name, "{strategy}").strip()


def _render_list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _wrap(text: str) -> list[str]:
    indent = "  " if text.startswith("* ") else ""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
