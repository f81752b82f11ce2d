"""An algorithm of your own: one function and one row of the table. Here it is RLOO's advantage
(2402.14740).

    torchrun examples/my_algorithm.py --algorithm mine --steps 20      all options of train.py
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import train
from algorithms import ALGORITHMS
from engine.run.options import run_program


def leave_one_out(rollout):
    """A_i = r_i − mean of the other G − 1 rewards of the question, (Q, G): not divided by the
    std."""
    r = rollout.total
    G = r.shape[1]
    # A_i = r_i − (Σ_j r_j − r_i) / (G − 1)
    return r - (r.sum(1, keepdim=True) - r) / (G - 1)


if __name__ == "__main__":
    ALGORITHMS["mine"] = replace(ALGORITHMS["grpo"], advantages=leave_one_out)
    run_program(train.main)
