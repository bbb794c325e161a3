"""The name of a result, such as a draft: the digest of all that it was made from, which is the name of its folder.

Commands take any begin of it that no other result has. A data version is not a name: results of equal content share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from draftworks.errors import StoreError
from draftworks.storage.artifacts import Artifact
from draftworks.storage.suggestions import suggest_or_list
from draftworks.storage.words import list_names

LEAST_VERSION = 8
"""Characters of a data version that are enough to recognise it."""
_SHOWN = 5
_ROOM = 18 * _SHOWN
"""Characters for so many names."""


def read_names(results: Iterable[Artifact]) -> dict[str, str]:
    """Return the data version of each result by its name, in the order given."""
    return {each.path.name: each.data_version for each in results}


def choose_name(given: str, known: Mapping[str, str | None], what: str = "draft") -> str:
    """Return the name of the result that a user means.

    Args:
        given: the name or its begin.
        known: data version by name; None where it is not known.
        what: kind of result, for the message.

    Raises:
        StoreError: none begins so, or several do; a data version is answered with the name.
    """
    if given in known:
        return given
    found = [name for name in known if given and name.startswith(given)]
    if len(found) == 1:
        return found[0]
    if found:
        raise StoreError(f"several {what}s begin with {given}: {list_names(found, _SHOWN)}. Give more of it")
    hint = explain_data_version(given, known, what)
    if hint is not None:
        raise StoreError(hint)
    raise StoreError(f"no {what} {given!r:.80}; {suggest_or_list(given, known, _ROOM)}")


def explain_data_version(given: str, known: Mapping[str, str | None], what: str = "draft") -> str | None:
    """Return the name to use in place of a data version, or of its begin, in words; None if it is none."""
    if len(given) < LEAST_VERSION:
        return None
    same = [name for name, version in known.items() if version is not None and version.startswith(given)]
    if not same:
        return None
    return f"{given} is the data version of {what} {list_names(same, _SHOWN, between=' and ')}, which goes by that name: give {same[0]}"
