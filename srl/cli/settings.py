"""`srl settings`: every setting of an algorithm, as `srl train --set` takes it."""

import dataclasses
import enum
import inspect
import shutil
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import click

from srl.base.settings import Settings


@click.command()
@click.argument("algorithm", required=False)
def settings(algorithm: str | None) -> None:
    """List an algorithm's settings with default and meaning, or the algorithms.

    \b
    Examples:
      srl settings
      srl settings dqn
      srl train CartPole-v1 --max-train-count 20000 --set lr=0.0005 --set hidden_block.mlp=64,64
    """  # noqa: D301
    from srl.base.algorithm import ALGORITHMS
    from srl.runner.plugins import find_algorithm, load_plugins

    if algorithm is None:
        load_plugins()
        click.echo("\n".join(sorted(ALGORITHMS)))
        return
    config = find_algorithm(algorithm)()
    width = min(shutil.get_terminal_size().columns, 100)
    click.echo(f"srl train ENV --algorithm {algorithm} --set NAME=VALUE, where NAME=DEFAULT is one of:\n")
    for name, text in _describe(config, ""):
        click.echo(name)
        click.echo(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    "))


def _describe(config: Settings, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield `name=default` and its meaning for every setting, and for every shorthand that sets several."""
    from srl.rl.schedules import Schedule

    for field in dataclasses.fields(typing.cast(Any, config)):
        value, doc = getattr(config, field.name), str(field.metadata.get("doc", ""))
        name = prefix + field.name
        if isinstance(value, Settings):
            is_number = isinstance(value, Schedule)  # one alone is a constant schedule
            yield f"{name}={value.start if value.is_set else 'NUMBER'}" if is_number else name, doc
            yield from _describe(value, f"{name}.")
        elif isinstance(value, list):
            yield name, f"{doc} (in Python only)"
        else:
            yield f"{name}={_text(value)}", "; ".join([doc, *_bounds(field.metadata)])
    for method_name, method in inspect.getmembers(type(config), inspect.isfunction):
        if method_name.startswith("set_"):
            arguments = list(inspect.signature(method).parameters.values())[1:]
            shorthand = prefix + method_name.removeprefix("set_")
            yield f"{shorthand}={_usage(arguments)}", f"shorthand: {(method.__doc__ or '').strip().splitlines()[0]}"


def _usage(arguments: list[inspect.Parameter]) -> str:
    """Return what follows `=`: a tuple takes all the values, else there is one for each argument."""
    if not arguments:
        return ""
    default = arguments[0].default
    if isinstance(default, tuple):
        return _text(default)
    return ",".join(
        argument.name.upper() if argument.default is argument.empty else _text(argument.default)
        for argument in arguments
    )


def _bounds(metadata: typing.Mapping[str, Any]) -> Iterator[str]:
    if metadata.get("choices"):
        yield f"one of {', '.join(map(str, metadata['choices']))}"
    for key, words in (("low", "at least"), ("above", "above"), ("high", "at most")):
        if metadata.get(key) is not None:
            yield f"{words} {metadata[key]:g}"


def _text(value: Any) -> str:
    """Return a value as `--set` reads it."""
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value.value if isinstance(value, enum.Enum) else value)
