"""Draws the pictures of the tables again, from the stored results: nothing is trained.

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
from experiments.library import plot

RESULTS = Path(__file__).parents[1] / "results"
ONE = {  # of these the picture has the name of the results
    "claims_real": claims_real, "collapse": collapse, "dynamic": dynamic,
    "moe": moe, "tradeoff": tradeoff,
}
SEVERAL = {"claims": claims, "judge": judge}


def stored(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def draw(name):
    """Draw one picture, or the two of Table 1, of the claims or of the judge."""
    picture = RESULTS / f"{name}.png"
    if name in SEVERAL:
        SEVERAL[name].draw(stored(name), RESULTS)
    elif name in ONE:
        ONE[name].picture(stored(name), picture)
    elif name in ("real", "real_second"):
        real.picture(stored(name)["rows"], picture, real.TITLES[name])
    else:
        table = reproduce.TABLES[name.removeprefix("table")]
        table.picture(stored(name)["rows"], picture)
    if name == "table1":
        rows = [row for row in stored(name)["rows"] if "mini-batches" not in row["name"]]
        plot.time_to_accuracy(rows, RESULTS / "time_to_accuracy.png")


def main(names):
    tables = ["table1" if name == "1" else name for name in reproduce.TABLES]
    drawn = [name for name in tables if (RESULTS / f"{name}.json").is_file()]
    for name in names or [*drawn, *ONE, *SEVERAL, "real", "real_second"]:
        draw(name)
        print(f"drawn again: {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
