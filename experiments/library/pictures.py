"""Draws the pages and pictures again, from the stored results: nothing is trained.

    python experiments/library/pictures.py                 all of them
    python experiments/library/pictures.py family real     these
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the project's root

from experiments import (
    claims,
    claims_real,
    collapse,
    dynamic,
    judge,
    moe,
    real,
    reproduce,
    tradeoff,
)
from experiments.library.study import draw

RESULTS = OUTPUT = Path(__file__).parents[1] / "results"
TABLES = [reproduce.stem_of(name) for name in reproduce.TABLES]
STUDIES = {
    "claims": claims, "collapse": collapse, "dynamic": dynamic, "judge": judge, "moe": moe,
    "tradeoff": tradeoff, **{name: reproduce for name in TABLES},
}


def again(name):
    """Draw the page and the pictures of one result."""
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    picture = OUTPUT / f"{name}.png"
    if name == "claims_real":
        claims_real.picture(result, picture)
    elif name in real.TITLES:
        real.picture(result["rows"], picture, real.TITLES[name])
    else:
        program = STUDIES[name]
        draw(OUTPUT, name, result, program.page, program.picture)


def main(names):
    for name in names or [*STUDIES, "claims_real", *real.TITLES]:
        again(name)
        print(f"drawn again: {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
