"""SRL beside its peers in one run: `make bench-peers`.

    python -m benchmarks.peers --python .venv-peers/bin/python

Each program is a fresh interpreter that trains Pendulum-v1 and evaluates ten episodes; they take turns, so
that what else the machine does meets all of them.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks.speed import time_command, time_job

PEER = Path(__file__).parent / "stable_baselines3_dqn.py"


def main() -> None:
    """Run all programs `--repeats` times and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-peers/bin/python", help="interpreter that has requirements.txt")
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    peer = [arguments.python, str(PEER), "--updates", str(arguments.updates)]
    programs: dict[str, Callable[[], tuple[float, float]]] = {
        "srl, one process": lambda: time_job("train", arguments.updates),
        "srl, trainer and 2 actors": lambda: time_job("mp", arguments.updates),
        "stable-baselines3, 8 envs": lambda: time_command(peer),
        "stable-baselines3, 1 env": lambda: time_command([*peer, "--envs", "1"]),
    }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(arguments.repeats):
        for name, program in programs.items():
            results[name].append(program())
            print(f"{name}: {results[name][-1][0]:.1f} s, mean reward {results[name][-1][1]:.0f}", flush=True)
    first = statistics.median(seconds for seconds, _ in results["srl, one process"])
    print(f"\n{arguments.updates:,} updates and 10 evaluation episodes, median of {arguments.repeats}")
    print(f"{'':28}{'wall time':>11}{'ratio':>8}{'mean reward':>13}")
    for name, result in results.items():
        seconds = statistics.median(seconds for seconds, _ in result)
        reward = statistics.mean(mean for _, mean in result)
        print(f"{name:28}{seconds:9.1f} s{seconds / first:8.1f}{reward:13.0f}")


if __name__ == "__main__":
    main()
