"""Base class of all models that are read from YAML, and what is wrong with a value in words for who writes YAML. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from draftworks.storage.words import OTHER_WORDS, find_close, list_fitting, list_names, rate, suggest, suggest_or_list

Dtype = Literal["float32", "bfloat16"]
Item = TypeVar("Item", str, float)


def require_distinct(values: list[Item]) -> list[Item]:
    """Return the values. Raises ValueError if one is given twice."""
    repeated = next((each for number, each in enumerate(values) if each in values[:number]), None)
    if repeated is not None:
        raise ValueError(f"expected each once, found {repeated} twice")
    return values


def require_environment_name(value: str) -> str:
    """Return the name of an environment variable. Raises ValueError for anything else, as for the secret itself."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) is None:
        raise ValueError("expected the name of an environment variable, such as SERVER_KEY, not what it holds")
    return value


EnvironmentName = Annotated[str, AfterValidator(require_environment_name)]
DistinctNames = Annotated[list[str], AfterValidator(require_distinct)]
DistinctNumbers = Annotated[list[float], AfterValidator(require_distinct)]


class Spec(BaseModel):
    """Base of all models read from YAML: frozen, no unknown keys, finite numbers only (digests use JSON, which has no others)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_switches_as_numbers(cls, values: Any) -> Any:
        """Raise ValueError for true or false where a number belongs, which Python would take for 1 or 0."""
        for name, value in values.items() if isinstance(values, Mapping) else ():
            field = cls.model_fields.get(name) if isinstance(value, bool) else None
            types = set() if field is None else {field.annotation, *get_args(field.annotation)}
            if types & {int, float} and bool not in types:
                raise ValueError(f"{name}: expected a number, found {str(value).lower()}")
        return values


SpecType = TypeVar("SpecType", bound=Spec)

CREDENTIALS = re.compile(r"//[^/\s]*@")
"""Credentials in a URL; error messages mask them."""
SECRET = ("_key_env", "url_env")
"""Ends of keys whose value is not shown in messages, since users write a secret there by mistake."""
LONGEST = 200
"""Characters of a line, with the path of its file from the registry on."""
_LONGEST_PLACE = 60
_MOST_PLACES = 3
_SURE = 0.8
"""Similarity from which on a key is taken for a misspelt one of its place, or else of another place."""
_KEYS = "expected keys with values"
_EXPECTED: dict[str, str] = {
    "greater_than": "expected more than {gt:.10g}",
    "greater_than_equal": "expected at least {ge:.10g}",
    "less_than": "expected less than {lt:.10g}",
    "less_than_equal": "expected at most {le:.10g}",
    "finite_number": "expected a finite number",
    "too_short": "expected a list of at least {min_length}",
    "too_long": "expected a list of at most {max_length}",
    "string_too_short": "expected text",
    "string_too_long": "expected at most {max_length} characters",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "expected a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "expected a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "expected true or false"),
    **dict.fromkeys(("string_type", "string_sub_type"), "expected text"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type"), "expected a list"),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type"), _KEYS),
    **dict.fromkeys(("dataclass_type", "dataclass_exact_type"), _KEYS),
}
"""By the type of pydantic's error, whose own words are of Python's types and classes."""

Beside = Callable[[], Mapping[str, type[BaseModel]]]
"""Returns models of other places of the same file by their path, for keys that belong there."""


@dataclass(frozen=True)
class PlainErrors:
    """Says the problems that a model has with the values of a file.

    Attributes:
        where: the file, and what of it the model is of.
    """

    model: type[BaseModel]
    where: str
    beside: Beside = dict

    def describe(self, problem: Mapping[str, Any]) -> str:
        """Return one line about an error of pydantic's: where, expected, found, and what may be meant."""
        path, kind = [str(part) for part in problem["loc"]], problem["type"]
        if path and path[-1] == "[key]":  # of a mapping whose keys are given
            *_, key, _ = path
            return self._say(f"unknown key {'.'.join(path[:-1])}", suggest_or_list(key, _list_allowed(problem)))
        if kind == "extra_forbidden":
            return self._say(f"unknown key {'.'.join(path)}", self._place_key(path[-1], tuple(problem["loc"][:-1])))
        if kind == "missing":
            return self._say(f"key {'.'.join(path)} is missing")
        return self._describe_value(".".join(path), problem)

    def _describe_value(self, key: str, problem: Mapping[str, Any]) -> str:
        given, allowed = problem["input"], _list_allowed(problem)
        expected = self._say_pattern(problem) or _say_expected(problem, allowed)
        hint = (suggest(given, allowed) if isinstance(given, str) else "") or self._advise(problem)
        # If several keys contradict each other, or a check has found something itself, its message has the values.
        own_words = problem["type"] == "value_error"
        if own_words and (isinstance(given, Mapping) or re.search("found|did you mean", expected)):
            return self._say(f"{key}: {expected}" if key else expected, hint)
        secret = key.endswith(SECRET)
        for width in (80, 40, 20):
            found = "(not shown)" if secret else show(given, width)
            text = self._say(f"{key}: {expected}, found {found}" if key else f"{expected}, found {found}", hint)
            if len(text) - len(self.where) + min(len(self.where), _LONGEST_PLACE) <= LONGEST:
                break
        return text

    def _say_pattern(self, problem: Mapping[str, Any]) -> str:
        """Return an example of the text that a key takes, which says more than a pattern; empty for other problems."""
        if problem["type"] != "string_pattern_mismatch":
            return ""
        *path, key = problem["loc"]
        fields = [one.model_fields[key] for one in _find_models_at(self.model, tuple(path)) if key in one.model_fields]
        examples = [str(each) for field in fields for each in field.examples or ()]
        return f"expected text like {list_fitting(examples or [problem['ctx']['pattern']])}"

    def _say(self, problem: str, hint: str = "") -> str:
        return f"{self.where}: {problem}" + (f"; {hint}" if hint else "")

    def _place_key(self, key: str, location: tuple[Any, ...]) -> str:
        """Return what an unknown key may be: another name of one here, one of another place, or one like it here."""
        known = _list_keys_at(self.model, location)
        here = find_close(key, known)
        if here and (here[0] in OTHER_WORDS.get(key.casefold(), ()) or rate(key, here[0]) >= _SURE):
            return suggest(key, known)
        places = self._find_places()
        if key in places:
            return f"it belongs to {_name_places(places[key])}"
        elsewhere = [name for name in find_close(key, places, most=1) if rate(key, name) >= _SURE]
        if elsewhere:
            return f"did you mean {elsewhere[0]}, which belongs to {_name_places(places[elsewhere[0]])}?"
        return suggest_or_list(key, known)

    def _find_places(self) -> dict[str, list[str]]:
        """Return the sections of the file that have a key, by the key."""
        found: dict[str, list[str]] = {}
        for root, tree in {"": self.model, **self.beside()}.items():
            for place, model in _walk(tree, root):
                for name in model.model_fields:
                    found.setdefault(name, []).append(place or "the top of the file")
        return found

    def _advise(self, problem: Mapping[str, Any]) -> str:
        """Return what to write instead, where the kind of what was found shows it."""
        given, kind = problem["input"], problem["type"]
        if kind == "list_type":
            return "write - before its first key" if isinstance(given, Mapping) else f"write [{_show_item(given)}]"
        if kind in ("string_type", "literal_error") and isinstance(given, bool):
            return "YAML reads yes, no, on, off as true, false: quote it"
        if kind == "string_type" and isinstance(given, int | float):
            return f"write it in quotes: '{given}'"
        if kind in ("int_parsing", "float_parsing") and re.match(r"\s*[+-]?\d", str(given)):
            return "write the number alone, without a unit"
        if _EXPECTED.get(kind) is _KEYS:
            return self._advise_keys(given, problem["loc"])
        return ""

    def _advise_keys(self, given: Any, location: tuple[Any, ...]) -> str:
        models = _find_models_at(self.model, location)
        fields = models[0].model_fields if models else {}
        close = find_close(given, fields) if isinstance(given, str) else []
        if close:
            return f"did you mean {{{close[0]}: ...}}?"
        kinds = [
            name for name, field in fields.items() if isinstance(given, str) and given in get_args(field.annotation)
        ]
        if kinds:
            return f"did you mean {{{kinds[0]}: {given}}}?"
        if isinstance(given, list) and given and all(isinstance(each, str) for each in given):
            return f"write {given[0]}: {{}}, a line for each"
        needed = [name for name, field in fields.items() if field.is_required()]
        if needed:
            return f"it needs {list_fitting(needed)}"
        return "write {} for its defaults, or leave the key out"


def _name_places(places: list[str]) -> str:
    """Return the sections, those with the shortest paths first; of many, how many more there are."""
    return list_names(sorted(dict.fromkeys(places), key=len), _MOST_PLACES, between=" or ")


def _say_expected(problem: Mapping[str, Any], allowed: list[str]) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if allowed:
        return f"expected {'' if len(allowed) == 1 else 'one of '}{list_fitting(allowed)}"
    if kind in _EXPECTED:
        return _EXPECTED[kind].format(**context)
    message = str(problem["msg"]).removeprefix("Value error, ")
    return message.replace("Input should be", "expected")


def _list_allowed(problem: Mapping[str, Any]) -> list[str]:
    if problem["type"] not in ("literal_error", "enum"):
        return []
    return re.findall("'([^']*)'", problem.get("ctx", {}).get("expected", ""))


def _show_item(value: Any) -> str:
    """Return a value as an item of a list; several numbers in one text as these."""
    numbers = isinstance(value, str) and re.fullmatch(r"\s*-?[\d.]+(\s*,\s*-?[\d.]+)*\s*", value)
    return ", ".join(part.strip() for part in value.split(",")) if numbers else show(value, 40)


def show(value: Any, width: int = 80) -> str:
    """Return a value as YAML has it, in at most `width` characters, without credentials."""
    if value is None:
        return "nothing"
    text = repr(value) if isinstance(value, str | float) else json.dumps(value, default=str, ensure_ascii=False)
    text = " ".join(CREDENTIALS.sub("//***@", text).split())
    return text if len(text) <= width else text[: width - 3] + "..."


def _list_keys_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Return the keys of the models at a location; empty if there is no model."""
    return list(dict.fromkeys(name for one in _find_models_at(model, location) for name in one.model_fields))


def _find_models_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[type[BaseModel]]:
    """Return the models that are nested in `model` at a location, through lists, mappings and unions."""
    current: list[type[BaseModel]] = [model]
    for part in location:
        fields = [one.model_fields[part] for one in current if part in one.model_fields]
        if fields:
            current = [each for field in fields for each in _find_models_in(field.annotation)]
        # else a key of a mapping, or a place in a list: what it holds was found with the field
    return current


def _find_models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for each in get_args(annotation) for found in _find_models_in(each)]


def _walk(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the path and the model of every section; one of a mapping or list by NAME."""
    yield path, model
    for name, field in model.model_fields.items():
        named = f"{path}.{name}" if path else name
        for nested in _find_models_in(field.annotation):
            yield from _walk(nested, f"{named}.NAME" if _is_container(field.annotation) else named)


def _is_container(annotation: Any) -> bool:
    """Whether a type is a list or mapping, or a union with one."""
    return get_origin(annotation) in (list, dict, tuple) or any(
        get_origin(each) in (list, dict, tuple) for each in get_args(annotation)
    )
