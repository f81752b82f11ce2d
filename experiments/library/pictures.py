"""Draws pages and pictures of reproduce.py, noise.py and learning.py again, from the stored
results: nothing is trained.

    python experiments/library/pictures.py                           all of them, into runs/results
    python experiments/library/pictures.py --names family table1     these
    python experiments/library/pictures.py --output experiments/results    over the stored ones
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the project's root

from engine.base.program import run_program
from engine.options.command_line import option, parse
from experiments import learning, noise, reproduce
from experiments.library.study import RESULTS, draw

STORED = Path(__file__).parents[1] / "results"
STUDIES = {reproduce.stem_of(name): reproduce for name in reproduce.TABLES}
for size in ("cpu", "careless", "cpu_signs", "careless_signs"):
    STUDIES[f"learning_{size}"] = learning
STUDIES["pruned_baseline"] = noise


@dataclass
class Options:
    names: list[str] | None = option(None, "of results, as family; none: all")
    output: str = option(RESULTS, "folder of the pages and pictures")


def main(argv):
    options = parse(Options, argv)
    for name in options.names or STUDIES:
        result = json.loads((STORED / f"{name}.json").read_text(encoding="utf-8"))
        program = STUDIES[name]
        draw(options.output, name, result, program.page, program.picture)


if __name__ == "__main__":
    run_program(main)
