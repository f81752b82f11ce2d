"""An algorithm of your own: one function and one row of the table. Here it is OPO's advantage
(2505.23585).

    torchrun examples/my_algorithm.py --algorithm mine --steps 20      all options of train.py
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import train
from algorithms import ALGORITHMS
from engine.base.program import run_program


def by_length(rollout):
    """A_i = r_i − Σ_j |o_j| r_j / Σ_j |o_j|, (Q, G): a long completion counts more in the
    baseline."""
    r, lengths = rollout.total, rollout.lengths
    # b = Σ_j |o_j| r_j / Σ_j |o_j|
    baseline = (lengths * r).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)
    return r - baseline


if __name__ == "__main__":
    ALGORITHMS["mine"] = replace(ALGORITHMS["grpo"], advantages=by_length)
    run_program(train.main)
