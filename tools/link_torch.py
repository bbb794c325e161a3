"""Gives an environment the torch of another by links: the largest library is fetched and unpacked once.

Usage: python tools/link_torch.py ENVIRONMENT, with the Python that has torch. Links to torch, and to the libraries of
NVIDIA and Triton that it requires, are put into ENVIRONMENT/torch, which a .pth file leads to. pip counts them as
installed and never removes what they lead to. What is installed in ENVIRONMENT itself comes before them.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ITS_OWN = re.compile(r"(nvidia|cuda|triton)(-|_|$)")
"""Names of distributions that come with a build of torch; all others an environment pins itself."""


def list_distributions() -> list[Distribution]:
    """Return torch and, transitively, what of `ITS_OWN` is installed because of it."""
    found: dict[str, Distribution] = {}
    names = ["torch"]
    while names:
        name = names.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # for another system, or another extra
        required = (re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in found[name].requires or ())
        names.extend(each for each in required if ITS_OWN.match(each))
    return list(found.values())


def link_torch(environment: Path) -> None:
    """Link torch into `environment`, a virtual environment of the same Python version.

    Raises:
        PackageNotFoundError: this Python has no torch.
    """
    distribution("torch")
    folder = environment.resolve() / "torch"
    folder.mkdir(exist_ok=True)
    for each in list_distributions():
        for name in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / name
            link.unlink(missing_ok=True)
            link.symlink_to(Path(str(each.locate_file(name))))
    site = sysconfig.get_path("purelib", vars={"base": str(environment.resolve())})
    (Path(site) / "torch.pth").write_text(f"{folder}\n")


if __name__ == "__main__":
    link_torch(Path(sys.argv[1]))
