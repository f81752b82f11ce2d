"""Why does my reward not rise? The doctor reads the logs of a run and says what is wrong.

    python experiments/doctor.py runs/toy-cppo-1

What it looks for stands in engine/run/doctor.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.run.command_line import run_program
from engine.run.doctor import main

if __name__ == "__main__":
    run_program(main)
