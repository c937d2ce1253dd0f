"""Writing what a run leaves, so that a disk that refuses does not end the training.

The loop of one process and the client of a task write checkpoints and history through `Saving`.
"""

import logging
from collections.abc import Callable

from srl.base.errors import CheckpointError

logger = logging.getLogger("srl")


class Saving:
    """Tries writes of one kind; what fails is logged when it begins and when it is over, and kept as `failure`."""

    def __init__(self, what: str) -> None:
        """Prepare to write `what`, such as "checkpoints"."""
        self._what = what
        self.failure: CheckpointError | OSError | None = None
        """Why the last write failed, `None` where it did not."""

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write`; returns whether it succeeded. Only what a disk can be blamed for is kept back."""
        try:
            write()
        except (CheckpointError, OSError) as error:
            if self.failure is None:
                logger.error("%s cannot be written, training goes on and they are tried again: %s", self._what, error)
            self.failure = error
            return False
        if self.failure is not None:
            logger.error("%s can be written again", self._what)
        self.failure = None
        return True

    def note(self) -> str:
        """Say what is wrong now, for the run's status; empty where nothing is."""
        return "" if self.failure is None else f"{self._what} cannot be written: {self.failure}"

    def raise_failure(self) -> None:
        """Raise what the last write failed with, now that there is no later one."""
        if self.failure is not None:
            raise self.failure
