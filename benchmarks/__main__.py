"""All speed measurements, one after the other: `make bench`, or `python -m benchmarks`."""

import importlib.metadata
import os
import platform
import subprocess
import sys


def main() -> None:
    """Print the machine, then run each measurement in a process of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "numpy", "gymnasium"))
    print(f"{cores} cores, {platform.machine()} {platform.system()}, python {platform.python_version()}, {versions}")
    for command in ("learner", "actor", "broker-commands", "end-to-end"):
        print(f"\n{command}", flush=True)
        subprocess.run([sys.executable, "-m", "benchmarks.speed", command], check=True)


if __name__ == "__main__":
    main()
