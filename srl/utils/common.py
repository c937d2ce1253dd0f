"""`logger_print`, which scripts call to see the log on the console."""

import logging
import sys


class _Console(logging.Handler):
    """Writes to whatever `sys.stderr` is at the moment, so that a live table can put lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # a log that cannot be written must not stop a run
            self.handleError(record)


def logger_print(level: int = logging.INFO) -> None:
    """Send SRL's log from `level` on to the console; calling it again only changes the level."""
    logger = logging.getLogger("srl")
    logger.setLevel(level)
    # Otherwise a root logger that is set up as well prints every line twice.
    logger.propagate = False
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        handler = _Console()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
