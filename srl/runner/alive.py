"""A sign of life in a file, for the health checks of containers.

Main loops give it as they go round, so the file's age says for how long a worker has been stuck. Without
`SRL_ALIVE_FILE` nothing is written.
"""

import os
import time
from pathlib import Path

VARIABLE = "SRL_ALIVE_FILE"
EVERY_S = 1.0

_given_s = 0.0


def give_sign_of_life() -> None:
    """Touch the file, at most once a second."""
    global _given_s
    now_s = time.monotonic()
    if now_s - _given_s < EVERY_S:
        return
    _given_s = now_s
    if path := os.environ.get(VARIABLE):
        Path(path).touch()
