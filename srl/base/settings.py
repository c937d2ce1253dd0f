"""Settings: dataclasses that check every assignment and turn into JSON and back.

Every configuration object of SRL is a `Settings` dataclass: an attribute that does not exist, a value
of the wrong type or outside its range raises at the assignment, where the mistake is on the screen.
"""

import dataclasses
import difflib
import enum
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from srl.base.errors import ConfigError, UnknownFieldError

_MISSING = object()


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    factory: Any = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[Any, ...] | None = None,
) -> Any:
    """Declare a field of a `Settings` dataclass.

    Args:
        default: the value when nothing is given (`factory` makes a mutable one).
        doc: meaning, unit, and what a low and a high value do; shown by the command line.
        low, high: inclusive bounds of a number. above: exclusive lower bound.
        choices: the only values allowed.
    """
    metadata = {"doc": doc, "low": low, "high": high, "above": above, "choices": choices}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Settings:
    """Base of the configuration dataclasses; see the module's text."""

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        """Refuse a misspelt keyword like any other unknown attribute, with the nearest name."""
        for name in fields:
            if name not in _fields(cls):
                raise UnknownFieldError(_unknown(cls, name))
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        hints = _hints(type(self))
        if name not in hints:
            raise UnknownFieldError(_unknown(type(self), name))
        where = f"{type(self).__qualname__}.{name}"
        checked = _convert(hints[name], value, where)
        _check_range(_fields(type(self))[name].metadata, checked, where)
        object.__setattr__(self, name, checked)

    def __getattr__(self, name: str) -> Any:
        # Only reached when normal look-up failed. Private and dunder look-ups (copy, inspect) stay plain.
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownFieldError(_unknown(type(self), name))

    @classmethod
    def coerce(cls, value: Any) -> Any:
        """Turn a shorthand (a number for a schedule) into this kind of settings, or return it as it is."""
        return value

    def validate(self) -> None:
        """Raise `ConfigError` where settings contradict each other; nested settings are checked too."""
        for name in _fields(type(self)):
            setattr(self, name, getattr(self, name))  # a list may have been changed in place
        for settings in self._children():
            settings.validate()

    def nested(self) -> Iterator["Settings"]:
        """Yield the settings inside these, at any depth."""
        for settings in self._children():
            yield settings
            yield from settings.nested()

    def _children(self) -> Iterator["Settings"]:
        for value in vars(self).values():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Settings):
                    yield item

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data that `from_dict` turns back into equal settings.

        Raises `ConfigError` for a value that JSON does not have.
        """
        where = type(self).__qualname__
        return {name: _plain(getattr(self, name), f"{where}.{name}") for name in _fields(type(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild settings from `to_dict`'s data; unknown keys raise `UnknownFieldError`."""
        for name in data:
            if name not in _fields(cls):
                raise UnknownFieldError(_unknown(cls, name))
        for name, field in _fields(cls).items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and name not in data:
                raise ConfigError(f"{cls.__qualname__} needs '{name}'")
        return cls(**data)

    @classmethod
    def documentation(cls) -> dict[str, str]:
        """Return each field's documentation."""
        return {name: field.metadata.get("doc", "") for name, field in _fields(cls).items()}


class Named(Settings):
    """Base of settings that come in kinds, such as processors: each subclass registers under its class name.

    A kind of kinds is `class Processor(Named, key="processor")`; JSON data names the subclass under that key.
    """

    name: ClassVar[str] = ""
    _key: ClassVar[str]
    _registry: ClassVar[dict[str, type["Named"]]]

    def __init_subclass__(cls, key: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if key:
            cls._key, cls._registry = key, {}
        else:
            cls.name = cls.__name__
            cls._registry[cls.name] = cls

    @classmethod
    def coerce(cls, value: Any) -> Any:
        """Find the registered class that JSON data names; anything else is returned as it is."""
        if not isinstance(value, Mapping) or cls._key not in value:
            return value
        fields = dict(value)
        name = fields.pop(cls._key)
        if name not in cls._registry:
            known = ", ".join(sorted(cls._registry)) or "none"
            raise ConfigError(f"no {cls._key} is called {name!r}; known here: {known}")
        return cls._registry[name].from_dict(fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and, under the key, the registered name."""
        return {self._key: self.name, **super().to_dict()}


def set_by_path(settings: Settings, path: str, text: str) -> None:
    """Set `memory.capacity=5000`-like settings from the text a user typed.

    Where the last part names a `set_...` method (`hidden_block.mlp`), the text is its arguments:
    numbers and words separated by commas. A tuple field takes all of them.
    """
    *parents, last = path.split(".")
    target: Any = settings
    for depth, name in enumerate(parents, 1):
        if name not in _fields(type(target)):
            raise UnknownFieldError(_unknown(type(target), name))
        target = getattr(target, name)
        if not isinstance(target, Settings):
            raise ConfigError(f"{path}: {'.'.join(parents[:depth])} has no settings of its own")
    values = [_parse(part) for part in text.split(",")] if text else []
    method = getattr(type(target), f"set_{last.removeprefix('set_')}", None)
    if method is not None:
        hints = [hint for name, hint in typing.get_type_hints(method).items() if name != "return"]
        takes_tuple = hints and (typing.get_origin(hints[0]) is tuple or hints[0] is tuple)
        arguments = [tuple(values)] if takes_tuple else values
        signature = inspect.signature(method)
        try:
            signature.bind(target, *arguments)
        except TypeError:
            names = ", ".join(list(signature.parameters)[1:]) or "nothing"
            raise ConfigError(f"{path} takes {names} (separated by commas), not {text!r}") from None
        method(target, *arguments)
        return
    hint = _hints(type(target)).get(last)
    takes_many = hint is not None and typing.get_origin(hint) in (tuple, list)
    value = values if takes_many or len(values) != 1 else values[0]
    setattr(target, last, value)


def _parse(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    lowered = text.strip().lower()
    if lowered in words:
        return words[lowered]
    for convert in (int, float):
        try:
            return convert(lowered)
        except ValueError:
            continue
    return text.strip()


_FIELDS: dict[type, dict[str, dataclasses.Field[Any]]] = {}
_HINTS: dict[type, dict[str, Any]] = {}


def _fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    if cls not in _FIELDS:
        _FIELDS[cls] = {field.name: field for field in dataclasses.fields(cls)}
    return _FIELDS[cls]


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        hints = typing.get_type_hints(cls)
        _HINTS[cls] = {name: hints[name] for name in _fields(cls)}
    return _HINTS[cls]


def _unknown(cls: type, name: str) -> str:
    known = [*_fields(cls), *(entry for entry in dir(cls) if entry.startswith("set_"))]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else f"; it has {', '.join(_fields(cls))}"
    return f"{cls.__module__}.{cls.__qualname__} has no setting '{name}'{hint}"


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Check `value` against a type hint; the conversions are those JSON needs, and int to float."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(typing.get_args(hint), value, where)
    if origin is tuple and isinstance(value, (tuple, list)):
        args = typing.get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_convert(args[0], item, where) for item in value)
        if len(args) == len(value):
            return tuple(_convert(arg, item, where) for arg, item in zip(args, value, strict=True))
    elif origin is list and isinstance(value, (tuple, list)):
        return [_convert(typing.get_args(hint)[0], item, where) for item in value]
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif origin is Callable and callable(value):
        return value
    elif isinstance(hint, type):
        converted = _convert_plain(hint, value)
        if converted is not _MISSING:
            return converted
    raise ConfigError(f"{where} takes {_readable(hint)}, not {value!r} ({type(value).__name__})")


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    others = [option for option in options if option is not type(None)]
    if len(others) == 1 and isinstance(value, Mapping):
        return _convert(others[0], value, where)  # whose error says what is wrong inside
    for option in others:
        try:
            return _convert(option, value, where)
        except ConfigError:
            continue
    readable = " or ".join(_readable(option) for option in options)
    raise ConfigError(f"{where} takes {readable}, not {value!r} ({type(value).__name__})")


def _convert_plain(hint: type, value: Any) -> Any:
    if issubclass(hint, Settings):
        value = hint.coerce(value)
        if isinstance(value, Mapping):
            value = hint.from_dict(value)
        return value if isinstance(value, hint) else _MISSING
    if issubclass(hint, enum.Enum):
        if isinstance(value, hint):
            return value
        return next((member for member in hint if member.value == value), _MISSING)
    if hint is bool or isinstance(value, bool):
        return value if hint is bool and isinstance(value, bool) else _MISSING
    if hint is float and hasattr(value, "__float__") and not isinstance(value, str):
        return float(value)
    if hint is int and hasattr(value, "__index__"):
        return int(value)
    return value if isinstance(value, hint) else _MISSING


def _check_range(metadata: Mapping[str, Any], value: Any, where: str) -> None:
    choices = metadata.get("choices")
    if choices is not None and value not in choices:
        near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{where} must be one of {', '.join(map(repr, choices))}, not {value!r}{hint}")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if math.isnan(number):
            raise ConfigError(f"{where} must be a number, not NaN")
        low, high, above = metadata.get("low"), metadata.get("high"), metadata.get("above")
        bounds = [
            (low, low is not None and not number >= low, "at least"),
            (high, high is not None and not number <= high, "at most"),
            (above, above is not None and not number > above, "above"),
        ]
        for bound, broken, words in bounds:
            if broken:
                raise ConfigError(f"{where} must be {words} {bound:g}, not {number!r}")


def _readable(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Settings):
        return value.to_dict()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(f"{where} can be sent and saved as numbers, text, lists and dicts only, not as {value!r:.80}")
