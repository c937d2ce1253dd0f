"""A worker process of `LocalWorkers`: `python -m srl.runner.distribution.worker actor|trainer [work directory]`."""

import logging
import os
import sys
import threading

from srl.base.errors import SrlError
from srl.runner.distribution.parameters import RedisParameters
from srl.runner.distribution.servers import actor_run_forever, trainer_run_forever


def main() -> None:
    """Serve the broker that the environment names until standard input closes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    threading.Thread(target=_stop_with_parent, args=(stop,), name="srl-parent", daemon=True).start()
    role, *work_dir = sys.argv[1:]
    try:
        if role == "trainer":
            trainer_run_forever(RedisParameters(), None, work_dir=work_dir[0] if work_dir else None, stop=stop)
        else:
            actor_run_forever(RedisParameters(), None, stop=stop)
    except SrlError as error:
        sys.exit(str(error))


def _stop_with_parent(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        continue
    stop.set()


if __name__ == "__main__":
    main()
