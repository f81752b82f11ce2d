"""Why does my reward not rise? The doctor reads the logs of a run and says what to change.

    python tools/doctor.py runs/toy-cppo-1

engine/report/findings.py holds what it may find.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import progress
from engine.base.errors import UserError
from engine.base.program import run_program
from engine.report.findings import STEPS, diagnosis, seen


def nothing_found(metrics, steps):
    """What is said if there is no finding."""
    found = f"Nothing was found in {progress.count(steps, 'step')}"
    if steps < STEPS:
        return f"{found}. The accuracy can be judged only from {STEPS} steps on."
    return f"{found}. Of the samples: {seen(metrics, 'accuracy') or seen(metrics, 'reward')}."


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run, such as runs/toy-cppo-1")
    said, metrics, steps = diagnosis(parser.parse_args(argv).run)
    if not steps:
        raise UserError("this folder holds no run with at least one step: name another one.")
    print(said or nothing_found(metrics, steps))


if __name__ == "__main__":
    run_program(main)
