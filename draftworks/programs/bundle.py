"""`draftworks bundle`: a draft with its flags, its promise and its origin as one object, and whether such an object is whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftworks.errors import ConfigError, DraftworksError
from draftworks.programs.service_commands import CHECKOUT_REGISTRY, RegistryOption, open_service
from draftworks.programs.start import report_error
from draftworks.storage.files import explain_full_disk
from draftworks.storage.words import format_count

if TYPE_CHECKING:
    from draftworks.service.promotion import Service
    from draftworks.service.register import ServedDraft


def bundle(
    target: Annotated[str | None, typer.Argument(help="The registry's name of the model.")] = None,
    strategy: Annotated[str | None, typer.Argument(help="eagle3, dflash and their like.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", help="Digest of the draft, or its begin; by default the one in service, else the newest."
        ),
    ] = None,
    oci: Annotated[Path | None, typer.Option("--oci", help="Write an OCI image layout to this folder.")] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Write it as a plain folder.")] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Link the files where the file system can: whoever changes one changes both.")
    ] = False,
    verify: Annotated[
        Path | None, typer.Option("--verify", help="Read a bundle back, a layout or a folder, and compare all digests.")
    ] = None,
    expect: Annotated[
        str | None, typer.Option("--expect", help="With --verify: the digest that it has to have, sha256:…")
    ] = None,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Make one object of a draft to deploy: files, flags, promised tokens by slice, licences, lineage; or verify one.

    Prints its digest and where it is. Without --oci and --folder it is kept with the other results. With --verify and a
    target, the digest has to be the one that in_service.json names.
    """
    try:
        if (target is None) != (strategy is None):
            raise ConfigError("expected a target and a strategy, found one of them: draftworks bundle TARGET STRATEGY")
        if verify is not None:
            _verify(verify, expect, target, strategy, registry)
            return
        if expect is not None:
            raise ConfigError(
                "--expect is what --verify compares with: draftworks bundle --verify FOLDER --expect DIGEST"
            )
        if target is None or strategy is None:
            raise ConfigError("expected a target and a strategy, or --verify FOLDER: draftworks bundle TARGET STRATEGY")
        service = open_service(registry, target, strategy)
        served = _choose(service, draft)
        if oci is None and folder is None:
            made = service.bundle(served)
            typer.echo(f"{made.digest}  {service.artifacts.root / made.path}")
        _write(service, served, oci, folder, link)
    except DraftworksError as error:
        raise report_error(error) from None
    except OSError as error:
        place = oci or folder or Path()
        full = explain_full_disk(error, place)
        raise report_error(full or DraftworksError(f"{place}: cannot be written: {error}")) from None


def _choose(service: Service, draft: str | None) -> ServedDraft:
    """Return the draft in service, or another one that could be; all checks of a promotion but the rule are made of it."""
    from draftworks.service.candidate import find_candidate

    record = service.register.find()
    if record is not None and draft is None:
        return record.draft
    return find_candidate(service.artifacts, service.target, service.files, service.strategy, draft).served


def _write(service: Service, served: ServedDraft, oci: Path | None, folder: Path | None, link: bool) -> None:
    """Write the bundle to the folders that were asked for, and print the digest of each."""
    from draftworks.bundle.description import describe_bundle
    from draftworks.bundle.layout import list_export_files, publish_bundle, write_folder, write_layout

    wanted = [(place, write) for place, write in ((oci, write_layout), (folder, write_folder)) if place is not None]
    if not wanted:
        return
    subject = service.find_subject(served)
    files, description = list_export_files(subject.export), describe_bundle(subject)
    for place, write in wanted:
        written = publish_bundle(place, partial(write, files=files, description=description, link=link))
        typer.echo(f"{written.digest}  {place}")


def _verify(folder: Path, expect: str | None, target: str | None, strategy: str | None, registry: Path) -> None:
    """Print what a bundle is. Raises DraftworksError if it is damaged or altered, or not the one that is in service."""
    from draftworks.bundle.reading import read_bundle
    from draftworks.service.register import ServiceRegister
    from draftworks.targets.registry import Registry

    if target is not None and strategy is not None:
        named = ServiceRegister(Registry(registry).resolve_var_folder(), target, strategy).require().draft.bundle
        if named is None:
            raise ConfigError(
                f"target {target}, {strategy}: in_service.json names no bundle: set service.bundle, and promote a draft"
            )
        if expect not in (None, named.digest):
            raise ConfigError(f"--expect {expect}: in_service.json names {named.digest}")
        expect = named.digest
    found = read_bundle(folder, expect)
    typer.echo(
        f"{found.digest}  {folder}: whole, {format_count(len(found.names), 'file')}, {found.nbytes:,} bytes: "
        f"{describe(found.description)}"
    )
    if expect is None:
        typer.echo("compare the digest with that of whoever gave it to you, or give it as --expect", err=True)


def describe(description: Mapping[str, Any]) -> str:
    """Return whose bundle it is, in a few words; the description may be anybody's, with anything in it."""
    draft, target = (part if isinstance(part, dict) else {} for part in map(description.get, ("draft", "target")))
    words = (draft.get("strategy"), draft.get("digest"), target.get("name"), target.get("digest"))
    strategy, digest, name, weights = (str(word)[:80] for word in words)
    shown = f"{strategy} draft {digest} of {name} with the weights {weights}"
    return shown if shown.isprintable() else repr(shown)
