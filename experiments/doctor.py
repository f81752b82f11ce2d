"""Why does my reward not rise? The doctor reads the logs of a run and says what is wrong.

    python experiments/doctor.py runs/toy-cppo-1

What it looks for is in engine/run/doctor.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base.errors import UserError
from engine.run.command_line import run_program
from engine.run.doctor import STEPS, diagnosis, seen


def main(argv):
    sentences, metrics, steps = diagnosis(argv[0]) if len(argv) == 1 else ([], {}, 0)
    if not steps:
        raise UserError("name the folder of a run with at least one step: doctor.py runs/NAME.")
    print("\n".join(sentences) or nothing_found(metrics, steps))


def nothing_found(metrics, steps):
    if steps >= STEPS:
        return f"Nothing was found in {steps} steps: {seen(metrics, 'accuracy')}."
    looked = seen(
        metrics, "truncated unreadable reward_failures skipped_updates group_gap sampler_gap")
    return (f"{steps} steps are too few to judge the accuracy: that takes {STEPS}. Only "
            f"these were looked at, and nothing is wrong with them: {looked}.")


if __name__ == "__main__":
    run_program(main)
