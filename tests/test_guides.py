"""The guides: each `srl` line is one that the command line takes, links lead somewhere, both languages say the same."""

import re
import shlex
from pathlib import Path

import click
import pytest

from srl.cli.main import cli

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
ENGLISH = sorted(path for path in GUIDES.glob("*.md") if not path.name.endswith(".ja.md"))
ALL = sorted(GUIDES.glob("*.md"))


def blocks(path: Path) -> list[str]:
    return re.findall(r"```\w*\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def commands(path: Path) -> list[str]:
    """Return the `srl` commands of code blocks, and those within sentences."""
    text = path.read_text(encoding="utf-8")
    lines = [line for block in blocks(path) for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line for line in [*lines, *inline] if line.startswith("srl ")]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_every_command_is_one(path: Path) -> None:
    found = commands(path)
    assert found
    for line in found:
        group: click.Command = cli
        words = shlex.split(line)[1:]
        while isinstance(group, click.Group) and words:
            assert words[0] in group.commands, f"{line!r}: there is no {words[0]!r}"
            group = group.commands[words.pop(0)]
        if words:  # `srl deploy status` alone is complete; what has arguments has to parse
            group.make_context(line, words)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert link.startswith("https://") or (path.parent / link).exists(), link


@pytest.mark.parametrize("path", ENGLISH, ids=lambda path: path.name)
def test_both_languages_say_the_same(path: Path) -> None:
    other = path.with_suffix(".ja.md")
    assert other.exists() and f"({other.name})" in path.read_text(encoding="utf-8")
    assert [block for block in blocks(path)] == [block for block in blocks(other)]
    headings = [re.findall(r"^#+", p.read_text(encoding="utf-8"), re.MULTILINE) for p in (path, other)]
    assert headings[0] == headings[1]
