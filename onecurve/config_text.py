"""The config's text: overrides in, TOML out, and one line for whatever is wrong with it.

Every message has four parts: the key, the value seen, what is allowed, the cure. What is allowed is read from the
field itself, so that it can't drift from the check. This file takes the config's type as an argument: `config.py`
imports it, not the other way round.
"""

from __future__ import annotations

import difflib
import functools
import json
import operator
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from onecurve.errors import ConfigError
from onecurve.paths import read_bytes
from onecurve.paths import show as show_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_LIMIT = 1 << 20  # bytes
FAULT_EXAMPLE = "{ step = 12, factor = 1000.0 }"
_USER = re.compile(r"(?<=://)[^/?#]*@")
_SECRET_VALUE = re.compile(
    r"([?&;#][^=&;#]*(?:key|secret|token|password|passwd|signature|credential|\bsig)[^=&;#]*=)[^&;#]*", re.IGNORECASE
)


def refuse(name: str, value: Any, allowed: str, cure: str) -> NoReturn:
    """The one form of a refusal: what, value seen, what is allowed, the cure."""
    raise ConfigError(f"{name} = {show(value)}: {allowed}; {cure}")


def show(value: Any) -> str:
    """A value for a message: on one line, without secrets, cut where it is long."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    text = without_secrets(_toml(value))
    return text if len(text) <= 200 else text[:200] + "…"


def read_toml(path: Path, cure: str = "give a TOML file such as configs/demo.toml") -> dict[str, Any]:
    """The tables of a TOML file; a byte-order mark and CRLF are fine. ConfigError for whatever is no such file."""
    content = read_bytes(path, "config", cure, CONFIG_LIMIT, ConfigError)
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {show_path(path)}: byte {error.start} is not UTF-8; {cure}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"config {show_path(path)}: not valid TOML: {error}; {cure}") from None
    if not tables:
        raise ConfigError(f"config {show_path(path)}: is empty; {cure}")
    return tables


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Two levels of plain values as TOML. Floats are written by `repr`, so that they read back as the same bits."""
    lines = []
    for section, values in tables.items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's; TOML also wants DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    return str(value)


def without_secrets(url: str) -> str:
    """The URL without its user part (`user:password@`) and without the values of key, secret or token parameters."""
    return _SECRET_VALUE.sub(r"\1", _USER.sub("", url))


def apply_overrides(tables: dict[str, Any], overrides: Iterable[str], config: type[BaseModel]) -> None:
    """Write each `section.key=value` into the tables. A value that is not TOML is taken as a bare string."""
    for text in overrides:
        name, equals, raw = text.partition("=")
        keys = [key.strip() for key in name.split(".")]
        if not equals or len(keys) < 2 or not all(keys):
            raise ConfigError(f"--set {without_secrets(text)}: write it as section.key=value; {_hint(keys, config)}")
        table = tables
        for depth, key in enumerate(keys[:-1], 1):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {name}: {'.'.join(keys[:depth])} is a value, not a table; set it as a whole")
        table[keys[-1]] = _parse(raw.strip(), _field(keys, config))


def _hint(keys: list[str], config: type[BaseModel]) -> str:
    """What an override may have meant that names no section and key, or gives no value."""
    section = config.model_fields.get(keys[0])
    if section is not None and not any(keys[1:]):
        return f"the keys of {keys[0]} are {', '.join(_table_type(section).model_fields)}"
    name = ".".join(key for key in keys if key)
    if _field(name.split("."), config) is not None:
        return f"for example {name}=VALUE"
    return f"the nearest known key is {nearest(name, config)}" if name else "it names no key"


def _parse(raw: str, field: FieldInfo | None) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    value = parsed.get("value")
    # `data.source=2024` means the folder of that name; a line break must not smuggle other keys in
    wants_text = field is not None and field.annotation is str and not isinstance(value, str)
    return raw if wants_text or len(parsed) != 1 else value


def explain(error: Mapping[str, Any], config: type[BaseModel], tables: Mapping[str, Any]) -> str:
    """One line for one of pydantic's errors about `tables`."""
    keys = [key for key in error["loc"] if isinstance(key, str)]  # a place inside a tuple is the tuple's
    field, name, value = _field(keys, config), ".".join(keys), error["input"]
    if len(keys) < len(error["loc"]):
        value = functools.reduce(operator.getitem, keys, tables)
    if error["type"] == "extra_forbidden":
        kind = "section" if len(keys) == 1 and isinstance(value, dict) else "key"
        return f"unknown {kind} {name}: the nearest known one is {nearest(name, config, kind)}; rename or remove it"
    if error["type"] == "missing" and field is not None and field.is_required():
        return f"{name} is missing beside {show(value)}: write faults.lr_multiplier = {FAULT_EXAMPLE}"
    if field is None:
        return f"{name} = {show(value)}: {error['msg']}"
    if _table_type(field) is not None and len(keys) == 1:
        return f"{name} = {show(value)}: it must be a table; write [{name}] and its keys below"
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        name, example = "faults.lr_multiplier", FAULT_EXAMPLE
    else:
        example = FAULT_EXAMPLE if default is None else show(default)
    return f"{'.'.join(keys)} = {show(value)}: it must be {describe(field)}; for example {name} = {example}"


def describe(field: FieldInfo) -> str:
    """What a field allows, in words."""
    annotation, rules = field.annotation, list(field.metadata)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(show(choice) for choice in get_args(annotation))
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "text, not empty" if any(getattr(rule, "min_length", 0) for rule in rules) else "text"
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        return f"{len(items)} numbers, each {_bounds(rule for item in items[0].__metadata__ for rule in item.metadata)}"
    if annotation in (int, float):
        return f"a {'whole' if annotation is int else 'finite'} number {_bounds(rules)}"
    return "a table with its step and factor"


def nearest(name: str, config: type[BaseModel], kind: str = "key") -> str:
    """The known key (or section) closest to `name`: its own name in another section first, then by spelling."""
    sections: dict[str, Any] = {key: _table_type(field) for key, field in config.model_fields.items()}
    if kind == "section":
        return difflib.get_close_matches(name, list(sections), n=1, cutoff=0.0)[0]
    known = [f"{section}.{key}" for section, table in sections.items() for key in table.model_fields]
    if name.count(".") > 1:  # below a nested table
        known = [f"faults.lr_multiplier.{key}" for key in ("step", "factor")]
    section, _, key = name.rpartition(".")
    elsewhere = [full for full in known if full.endswith(f".{key}")]
    here = difflib.get_close_matches(name, [full for full in known if full.startswith(f"{section}.")], n=1, cutoff=0.75)
    by_key = difflib.get_close_matches(key, [full.rpartition(".")[2] for full in known], n=1, cutoff=0.75)
    same_key = [full for full in known if by_key and full.endswith(f".{by_key[0]}")]
    return (elsewhere or here or same_key or difflib.get_close_matches(name, known, n=1, cutoff=0.0))[0]


def _field(keys: list[str], config: type[BaseModel]) -> FieldInfo | None:
    """The field on this path, None for a path that is not known."""
    table: Any = config
    field = None
    for key in keys:
        if table is None or key not in table.model_fields:
            return None
        field = table.model_fields[key]
        table = _table_type(field)
    return field


def _table_type(field: FieldInfo) -> Any:
    """The table type of a field that is a table, perhaps an optional one; else None."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _bounds(rules: Iterable[Any]) -> str:
    words = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{word} {show(getattr(rule, name))}" for rule in rules for name, word in words.items() if hasattr(rule, name)
    ]
    return " and ".join(found)
