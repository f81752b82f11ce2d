"""Programs per second: in the sandbox, and with a new Python interpreter for each program.

    python experiments/sandbox.py              200 programs, as many at a time as there are cores
    python experiments/sandbox.py --programs 1000 --workers 8

A new interpreter has the same flags as the sandbox's and no protections. So its figure is the best
that a sandbox without a fork server could reach. The sandbox's figure includes the start of its
servers.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.scoring.sandbox import protections, run_many

PROGRAM = """
import math, random
def is_prime(n): return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))
print(sum(n for n in range(2000) if is_prime(n)))
"""


def in_the_sandbox(programs, workers):
    return [result.stdout for result in run_many(programs, workers=workers)]


def in_new_interpreters(programs, workers):
    def run(program):
        command = [sys.executable, "-I", "-S", "-E", "-B", "-c", program]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={}
        ).stdout

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, programs))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    print(
        "in force: "
        + ", ".join(name if held else f"NOT {name}" for name, held in protections().items())
    )
    for run in (in_the_sandbox, in_new_interpreters):
        start = time.perf_counter()
        outputs = run([PROGRAM] * options.programs, options.workers)
        seconds = time.perf_counter() - start
        assert outputs == ["277050\n"] * options.programs
        print(
            f"{run.__name__.replace('_', ' '):20} {options.programs / seconds:6.0f} programs a "
            f"second, {options.workers} at a time"
        )


if __name__ == "__main__":
    main()
