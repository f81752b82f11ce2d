"""Draws the pictures of the tables again, from the stored results: nothing is trained.

    python experiments/pictures.py                 all of them
    python experiments/pictures.py family limit    these
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from experiments import claims, limit, plot, real, reproduce

RESULTS = Path(__file__).with_name("results")


def stored(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def draw(name):
    """Draw one picture, or the two of Table 1 or of the claims."""
    picture = RESULTS / f"{name}.png"
    if name == "claims":
        claims.draw(stored(name), RESULTS)
    elif name == "limit":
        limit.picture(stored(name), picture)
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
    for name in names or [*drawn, "claims", "limit", "real", "real_second"]:
        draw(name)
        print(f"drawn again: {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
