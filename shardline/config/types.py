"""The value types of the config. Each has its range and the words that describe it in errors and documentation."""

from __future__ import annotations

import re
import reprlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from shardline.words import masked

_PLURALS: dict[Any, str] = {int: "whole numbers", Literal["model", "loss"]: "'model' and 'loss'"}
LARGEST = 2**63 - 1  # the largest integer a TOML file can hold


@dataclass(frozen=True)
class Expect:
    """The words of an error about a value out of range: `expected WORDS, got VALUE`."""

    words: str


def _holds(test: Callable[[Any], bool]) -> AfterValidator:
    def validate(value: Any) -> Any:
        if not test(value):
            raise ValueError("out of range")
        return value

    return AfterValidator(validate)


def _number(low: int, words: str, sentinel: int | None = None) -> tuple[Any, ...]:
    return _holds(lambda value: value == sentinel or low <= value <= LARGEST), Expect(words)


Positive = Annotated[int, *_number(1, "a whole number, 1 or more")]
NonNegative = Annotated[int, *_number(0, "a whole number, 0 or more")]
Port = Annotated[int, _holds(lambda value: 0 <= value < 2**16), Expect("a port, 0 to 65535")]
PositiveOrAll = Annotated[int, *_number(1, "-1 or a whole number, 1 or more", sentinel=-1)]
NonNegativeOrLatest = Annotated[int, *_number(0, "-1 or a whole number, 0 or more", sentinel=-1)]
NonNegativeFloat = Annotated[float, Field(ge=0), Expect("a finite number, 0 or more")]
PositiveFloat = Annotated[float, Field(gt=0), Expect("a finite number above 0")]
Fraction = Annotated[float, Field(ge=0, le=1), Expect("a number from 0 to 1")]
Share = Annotated[float, Field(gt=0, le=1), Expect("a number above 0, at most 1")]
Beta = Annotated[float, Field(ge=0, lt=1), Expect("a number from 0 to below 1")]

DecayRate = Annotated[float, Field(lt=0), Expect("a finite number below 0")]
AdafactorEps = Annotated[
    list[NonNegativeFloat], _holds(lambda value: len(value) == 2), Expect("a list of two numbers, 0 or more")
]
MomentumRange = Annotated[
    list[Beta],
    _holds(lambda value: len(value) == 2 and value[0] <= value[1]),
    Expect("a list of two numbers from 0 to below 1, the lower one first"),
]


def _is_text(value: str) -> bool:
    try:
        value.encode()  # lone surrogates (from undecodable arguments) cannot be written to any file
    except UnicodeEncodeError:
        return False
    return "\0" not in value


Text = Annotated[str, _holds(_is_text), Expect("a string")]
Name = Annotated[
    str, _holds(lambda value: bool(value.strip()) and _is_text(value)), Expect("a string that is not empty")
]
URL = Annotated[
    str,
    _holds(lambda value: re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", value) is not None and _is_text(value)),
    Expect("a URL such as 's3://bucket/run' or 'file:///disk/run'"),
]
EveryNth = Annotated[
    str,
    _holds(lambda value: value == "op" or (value.isascii() and value.isdigit() and 0 < len(value.lstrip("0")) < 10)),
    Expect("'op' or a string with a whole number, 1 or more, such as '2'"),
]
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?|(\d+)", re.ASCII)
_UNITS = (86400, 3600, 60, 1, 1)


def seconds_of(text: str) -> int | None:
    """The seconds in `90s`, `30m`, `4h`, `1d12h` or plain seconds; None for any other text."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        return None
    return sum(int(part) * unit for part, unit in zip(found.groups(), _UNITS, strict=True) if part is not None)


def _duration_text(value: Any) -> Any:
    """Turn seconds or false, given without quotes, into text; any other value stays."""
    if value is False or value == "false":
        return "0"
    return str(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value


Duration = Annotated[
    str,
    BeforeValidator(_duration_text),
    _holds(lambda value: len(value) < 40 and (seconds_of(value) or 0) <= LARGEST and seconds_of(value) is not None),
    Expect('a duration such as "90s", "30m", "4h", "1d12h", plain seconds, or false'),
]
ExitCode = Annotated[
    int,
    _holds(lambda value: value == 0 or 3 <= value <= 255),
    Expect("0 or a whole number from 3 to 255 (1 and 2 stand for errors)"),
]
NCCLVariables = Annotated[
    dict[str, str],
    _holds(lambda table: all(name.startswith("NCCL_") and _is_text(name) and _is_text(table[name]) for name in table)),
    Expect("a table of strings whose names begin with NCCL_"),
]
RankPattern = Annotated[dict[Name, Positive], Expect("a table of names and whole numbers, 1 or more")]
AlphaPattern = Annotated[dict[Name, PositiveFloat], Expect("a table of names and numbers above 0")]
SPECIAL_TOKENS = (
    *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    "additional_special_tokens",
)
SpecialTokens = Annotated[
    dict[str, Name | list[Name]],
    _holds(
        lambda table: all(
            name in SPECIAL_TOKENS and isinstance(table[name], list) == (name == SPECIAL_TOKENS[-1]) for name in table
        )
    ),
    Expect(f"a table of strings with the names {', '.join(SPECIAL_TOKENS)} (a list)"),
]
SourceTables = Annotated[list[dict[str, Any]], Expect("a list of tables, each with path and type")]


class Section(BaseModel):
    """Base of every section: read-only, without unknown keys, conversions between types, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def words(annotation: Any, metadata: Any = ()) -> str:
    """What a value of this type looks like, in words."""
    for item in metadata:
        if isinstance(item, Expect):
            return item.words
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return words(arguments[0], arguments[1:])
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(repr(item) for item in arguments)
    if origin in (Union, types.UnionType):
        parts = [words(item) for item in arguments if item is not type(None)]
        return " or ".join(parts) + (' (or "none")' if type(None) in arguments else "")
    if origin in (list, tuple):
        inner = arguments[0]
        return "a list of " + ("lists of strings" if get_origin(inner) is list else _PLURALS.get(inner, "strings"))
    simple = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}
    return simple.get(annotation, "a table")


def show(value: Any) -> str:
    """A value as an error shows it, shortened and without passwords."""
    value = without_passwords(value)
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        return short.repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number with thousands of digits"


def without_passwords(value: Any) -> Any:
    """Return a config value with the passwords in its URLs masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, list):
        return [without_passwords(one) for one in value]
    if isinstance(value, dict):
        return {key: without_passwords(one) for key, one in value.items()}
    return value


def short_type(annotation: Any) -> str:
    """The type as the documentation names it: `int`, `"a" | "b"`, `list of str`, `float or none`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return short_type(arguments[0])
    if origin is Literal:
        return " | ".join(f'"{item}"' for item in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if item is type(None) else short_type(item) for item in arguments)
    if origin in (list, tuple):
        return f"list of {short_type(arguments[0])}"
    if annotation in (bool, int, float, str):
        return str(annotation.__name__)
    return "table"


def is_optional(annotation: Any) -> bool:
    return type(None) in kinds(annotation)


def kinds(annotation: Any) -> set[type]:
    """The plain types of a value, found in Annotated, Literal and unions; `list` and `dict` for lists and tables."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kinds(arguments[0])
    if origin is Literal:
        return {type(item) for item in arguments}
    if origin in (Union, types.UnionType):
        return set().union(*(kinds(item) for item in arguments))
    if origin in (list, tuple):
        return {list}
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return {dict}
    return {annotation}
