import copy
import enum
import json
from dataclasses import dataclass
from typing import Any

import pytest

from srl.base.errors import ConfigError, UnknownFieldError
from srl.base.settings import Settings, set_by_path, setting


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Inner(Settings):
    size: int = setting(3, low=1, high=9, doc="how large")

    @classmethod
    def coerce(cls, value: Any) -> Any:
        return cls(value) if isinstance(value, int) and not isinstance(value, bool) else value

    def set_range(self, low: int, high: int) -> None:
        self.size = high - low

    def validate(self) -> None:
        super().validate()
        if self.size == 7:
            raise ConfigError("size 7 is taken")


@dataclass
class Outer(Settings):
    name: str = setting(doc="required")
    count: int = setting(1, low=0, doc="inclusive bounds")
    rate: float = setting(0.5, above=0, doc="exclusive bound")
    limit: int | None = setting(None, doc="optional")
    flag: bool = setting(False, doc="yes or no")
    kind: str = setting("plain", choices=("plain", "fancy"), doc="one of two")
    sizes: tuple[int, ...] = setting((1, 2), low=1, doc="several")
    pair: tuple[int, str] = setting((1, "a"), doc="two different")
    colour: Colour = setting(Colour.RED, doc="enum")
    inner: Inner = setting(factory=Inner, doc="nested")
    many: list[Inner] = setting(factory=list, doc="list of nested")
    free: dict[str, Any] = setting(factory=dict, doc="JSON data")

    def set_sizes_up_to(self, sizes: tuple[int, ...]) -> None:
        self.sizes = tuple(range(1, sizes[0] + 1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuont", "Outer has no setting 'cuont'; did you mean 'count'"),
        ("set_size_up_to", "did you mean 'set_sizes_up_to'"),
        ("zzzzzz", "it has name, count, rate"),
    ],
)
def test_an_unknown_attribute_raises_and_names_the_nearest(name: str, message: str) -> None:
    outer = Outer("x")
    with pytest.raises(UnknownFieldError, match=message):
        setattr(outer, name, 1)
    with pytest.raises(UnknownFieldError, match=message):
        getattr(outer, name)
    with pytest.raises(UnknownFieldError, match=message):
        Outer.from_dict({"name": "x", name: 1})
    assert not hasattr(outer, name)


def test_nested_settings_refuse_unknown_attributes_too() -> None:
    with pytest.raises(UnknownFieldError, match="Inner has no setting 'sise'; did you mean 'size'"):
        Outer("x").inner.sise = 4


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 1.5, r"Outer\.count takes int, not 1\.5 \(float\)"),
        ("count", "1", "takes int, not '1'"),
        ("count", True, "takes int, not True"),
        ("count", -1, "must be at least 0, not -1"),
        ("rate", 0.0, "must be above 0, not 0.0"),
        ("rate", float("nan"), "must be a number, not NaN"),
        ("rate", "fast", "takes float"),
        ("limit", "x", r"takes int or NoneType, not 'x'"),
        ("flag", 1, "takes bool, not 1"),
        ("kind", "fancyy", "must be one of 'plain', 'fancy', not 'fancyy'; did you mean 'fancy'"),
        ("sizes", (3, 0), "must be at least 1, not 0"),
        ("sizes", 3, "takes tuple"),
        ("sizes", ("a",), "takes int"),
        ("pair", (1, "a", 2), "takes tuple"),
        ("colour", "green", "takes Colour"),
        ("inner", "large", "takes Inner"),
        ("inner", 10, r"Inner\.size must be at most 9, not 10"),
        ("many", [1, "x"], "takes Inner"),
        ("free", [1], "takes dict"),
        ("name", None, "takes str"),
    ],
)
def test_a_wrong_value_raises_at_the_assignment_and_changes_nothing(name: str, value: Any, message: str) -> None:
    outer = Outer("x")
    with pytest.raises(ConfigError, match=message):
        setattr(outer, name, value)
    assert outer == Outer("x")
    with pytest.raises(ConfigError, match=message):
        Outer(**{"name": "x", name: value})


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("rate", 2, 2.0),
        ("limit", None, None),
        ("limit", 5, 5),
        ("count", 0, 0),
        ("sizes", [4], (4,)),
        ("colour", "blue", Colour.BLUE),
        ("inner", 4, Inner(4)),
        ("inner", {"size": 5}, Inner(5)),
        ("many", (1, {"size": 2}), [Inner(1), Inner(2)]),
    ],
)
def test_what_is_meant_is_taken(name: str, value: Any, stored: Any) -> None:
    outer = Outer("x")
    setattr(outer, name, value)
    assert getattr(outer, name) == stored
    assert type(getattr(outer, name)) is type(stored)


def full() -> Outer:
    return Outer(
        "x", 2, 0.25, 4, True, "fancy", (5,), (2, "b"), Colour.BLUE, Inner(4), [Inner(5)], {"a": [1, {"b": None}]}
    )


def test_json_round_trip() -> None:
    outer = full()
    assert all(getattr(outer, name) != getattr(Outer("y"), name) for name in Outer.documentation())
    assert Outer.from_dict(json.loads(json.dumps(outer.to_dict()))) == outer


def test_what_json_does_not_have_is_refused_by_name() -> None:
    outer = Outer("x", free={"a": {"b": object()}})
    with pytest.raises(ConfigError, match=r"Outer\.free\['a'\]\['b'\] can be sent and saved"):
        outer.to_dict()


def test_a_required_field_is_named() -> None:
    with pytest.raises(ConfigError, match="Outer needs 'name'"):
        Outer.from_dict({"count": 1})
    with pytest.raises(TypeError, match="name"):
        Outer()  # type: ignore[call-arg]


def test_copies_are_equal_and_apart() -> None:
    outer = full()
    deep = copy.deepcopy(outer)
    assert copy.copy(outer) == deep == outer
    deep.inner.size = 9
    deep.free["a"].append(2)
    assert outer == full()
    with pytest.raises(UnknownFieldError):
        deep.nonsense = 1


def test_defaults_are_not_shared() -> None:
    Outer("x").many.append(Inner(1))
    Outer("x").inner.size = 8
    assert Outer("x").many == []
    assert Outer("x").inner.size == 3


def test_validate_reaches_nested_settings_and_lists_that_were_changed_in_place() -> None:
    with pytest.raises(ConfigError, match="size 7 is taken"):
        Outer("x", inner=Inner(7)).validate()
    with pytest.raises(ConfigError, match="size 7 is taken"):
        Outer("x", many=[Inner(7)]).validate()
    outer = Outer("x")
    outer.many.append("nonsense")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes Inner, not 'nonsense'"):
        outer.validate()
    full().validate()


@pytest.mark.parametrize(
    ("path", "text", "name", "value"),
    [
        ("count", "5", "count", 5),
        ("rate", "1e-3", "rate", 0.001),
        ("limit", "none", "limit", None),
        ("flag", "True", "flag", True),
        ("kind", "fancy", "kind", "fancy"),
        ("sizes", "7", "sizes", (7,)),
        ("sizes", "7, 8", "sizes", (7, 8)),
        ("sizes_up_to", "3", "sizes", (1, 2, 3)),
        ("inner.size", "4", "inner", Inner(4)),
        ("inner", "4", "inner", Inner(4)),
        ("inner.range", "2,7", "inner", Inner(5)),
        ("colour", "blue", "colour", Colour.BLUE),
    ],
)
def test_set_by_path(path: str, text: str, name: str, value: Any) -> None:
    outer = Outer("x")
    set_by_path(outer, path, text)
    assert getattr(outer, name) == value


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("inner.sise", "4", "did you mean 'size'"),
        ("iner.size", "4", "did you mean 'inner'"),
        ("inner.size", "10", "at most 9"),
        ("count.size", "4", "count has no settings of its own"),
        ("count.size.x", "4", "count has no settings of its own"),
        ("inner.size.x", "4", r"inner\.size has no settings of its own"),
        ("inner.validate.x", "4", "no setting 'validate'"),
        ("inner.range", "2", "takes low, high"),
        ("inner.range", "1,2,3", "takes low, high"),
    ],
)
def test_set_by_path_explains_what_is_wrong(path: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        set_by_path(Outer("x"), path, text)


def test_every_field_is_documented() -> None:
    assert Outer.documentation()["count"] == "inclusive bounds"
    assert list(Outer.documentation())[:3] == ["name", "count", "rate"]
