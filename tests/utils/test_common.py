"""The console log."""

import logging
from collections.abc import Iterator

import pytest

from srl.utils import common
from srl.utils.common import logger_print


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    logger = logging.getLogger("srl")
    before = logger.level, logger.propagate, logger.handlers[:]
    yield
    logger.level, logger.propagate, logger.handlers = before
    logging.getLogger("srl").setLevel(before[0])


def test_lines_are_printed_once_however_often_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    logger_print()
    common.logger_print()
    logging.getLogger("srl").info("hello %d", 5)
    logging.getLogger("srl.runner").warning("below")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == ["INFO hello 5", "WARNING below"]


def test_the_last_level_counts(capsys: pytest.CaptureFixture[str]) -> None:
    logger_print(logging.WARNING)
    logging.getLogger("srl").info("unseen")
    assert capsys.readouterr().err == ""
    logger_print(logging.DEBUG)
    logging.getLogger("srl").debug("seen")
    assert "seen" in capsys.readouterr().err
