"""Why Dagster's instance cannot be opened, or lost its database, in one line instead of a traceback."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

INSTALL = "pip install -c constraints.txt -e '.[postgres]'"
VARIABLE = re.compile(r'environment variable "(\w+)" which is not set')
CLIENTS = ("dagster_postgres", "psycopg2", "psycopg")


def describe_instance_problem(error: BaseException) -> str | None:
    """Return what is wrong with the instance, if that is why an error was raised."""
    where = os.path.join(os.environ.get("DAGSTER_HOME", ""), "dagster.yaml")
    for cause in _iterate_causes(error):
        text = str(cause)
        if (found := VARIABLE.search(text)) is not None:
            return f"{where}: the environment variable {found[1]} is not set; deploy/draftworks.env.example has all of them"
        if "Couldn't import module dagster_postgres" in text:
            return f"{where}: expected Dagster's Postgres library, found none: {INSTALL}"
        if isinstance(cause, ModuleNotFoundError) and cause.name in CLIENTS:
            return f"{where}: expected the Postgres libraries, with SQLAlchemy before 2.1, found no {cause.name}: {INSTALL}"
        if _is_from_database(cause):
            return (
                f"{where}: Dagster's database does not answer: {' '.join(str(getattr(cause, 'orig', cause)).split())}"
            )
    return None


def _is_from_database(error: BaseException) -> bool:
    from sqlalchemy.exc import OperationalError

    return isinstance(error, OperationalError)


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
