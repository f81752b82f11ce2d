"""Draws docs/speedups.png, the picture of the README: how many times as fast as GRPO is CPPO? It
depends on what is counted.

    python docs/speedups.py

Nothing is run. Each number but the paper's is computed from a stored result.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.report.curves import FAILS, GRPO  # noqa: E402
from experiments.library.plot import PALER, panels  # noqa: E402
from experiments.library.study import by_name  # noqa: E402
from experiments.library.train_for import reached  # noqa: E402
from experiments.reproduce import PAPER  # noqa: E402

GOAL, WINDOW = 0.85, 512  # the accuracy that the film waits for: the mean of so many completions


class Bar(NamedTuple):
    what: str  # is counted
    times: float  # as fast as GRPO
    colour: str
    said: str = ""


def stored(name):
    return json.loads((ROOT / f"experiments/results/{name}.json").read_text(encoding="utf-8"))


def rows_of(name):
    return by_name(stored(name)["rows"])


def bars():
    return [
        Bar("the paper: GSM8K, P = 0.9375", PAPER[0.9375][2], GRPO, "8.32 in print"),
        *of_the_gpu(), *of_the_toy(), of_the_film(), of_long_prompts(), of_a_real_model(),
        in_answers(),
    ]


def of_the_gpu():
    rows = {row[""]: row for row in stored("gpu")["parts"]["protocol"]["rows"]}
    most, usual = rows["CPPO, P = 0.9375"], rows["CPPO, P = 0.875"]
    return [
        Bar("H100, P = 0.9375", most["speed-up"],
            PALER["P=0.9375"], "speed alone"),
        Bar("H100, P = 0.875", usual["speed-up"], PALER["P=0.875"], "speed alone"),
        Bar("H100, P = 0.875; GRPO 16 together", usual["beside GRPO, 16 together"],
            PALER["P=0.875"], "CPPO 8 together"),
    ]


def of_the_toy():
    table1, together, controls = map(rows_of, ("table1", "together", "controls"))
    found = []
    what = {"P=0.9375": "toy, P = 0.9375", "P=0.875": "toy, P = 0.875"}
    for name, words in what.items():
        less = table1["GRPO"]["sampled"]["mean"] - table1[name]["sampled"]["mean"]
        times = table1[name]["speedup"]["median"]
        found.append(Bar(words, times, PALER[name], f"{less:.2f} less accurate"))
    grpo = together["GRPO, 8 mini-batches"]["seconds"]["values"]
    cppo = together["CPPO, P=0.875"]["seconds"]["values"]
    fair = median(a / b for a, b in zip(grpo, cppo))
    slow = controls["GRPO"]["seconds_to_85"]
    fast = controls["CPPO, P=0.875"]["seconds_to_85"]
    return [
        *found,
        Bar("toy, P = 0.875; GRPO, too, 8 together", fair, PALER["P=0.875"],
            "the fair pair"),
        Bar("toy, P = 0.875, until 85 of 100 are right", slow / fast, PALER["P=0.875"],
            f"{fast:.1f} and {slow:.1f} s"),
    ]


def of_the_film():
    slow, fast = map(seconds_to_goal, json.loads((ROOT / "docs/live/earlier.json").read_text()))
    return Bar("toy, the same in a browser", slow / fast, PALER["P=0.875"],
               f"{fast:.0f} and {slow:.0f} s")


def seconds_to_goal(run):
    """Of a run of the live page, whose steps are (seconds, accuracy, …)."""
    settings, steps = run["settings"], run["steps"]
    window = WINDOW // (settings["group_size"] * settings["questions_per_step"])
    for end in range(window, len(steps) + 1):
        if fmean(accuracy for _, accuracy, *_ in steps[end - window : end]) >= GOAL:
            return steps[end - 1][0]
    raise ValueError("this run does not reach the goal")


def of_long_prompts():
    result = stored("vs_trl_prompt150")
    seconds = []
    for name in ("grpo", "cppo"):
        of_step = median(step["total"] for step in result["seconds"][name])
        seconds.append(of_step / result["questions_per_step"][name])
    grpo, cppo = seconds
    return Bar("prompts of 150 tokens, P = 0.875", grpo / cppo, PALER["P=0.875"])


def of_a_real_model():
    rows = rows_of("real")
    curves = [rows[name]["curves"] for name in ("GRPO", "CPPO, P=0.75")]
    grpo, cppo = (median(reached(of_seeds, 0.5, 480)) for of_seeds in curves)
    return Bar("SmolLM2-135M, until 50 of 100 are right", grpo / cppo,
               PALER["P=0.75"], "P = 0.75: three seeds show no difference")


def in_answers():
    rows = rows_of("controls")
    grpo, cppo = (rows[name]["completions_to_85"] for name in ("GRPO", "CPPO, P=0.875"))
    return Bar("toy, counted in sampled answers", grpo / cppo, FAILS,
               f"CPPO needs {cppo / grpo:.1f} times as many")


def draw(path):
    figure, axis = panels(1, height=5.6, width=9.6)
    rows = bars()
    for y, bar in enumerate(rows):
        axis.barh(y, bar.times, color=bar.colour, height=0.68)
        number = f"{bar.times:.1f}"
        axis.text(bar.times + 0.12, y, number, va="center", fontsize=12, fontweight="bold")
        axis.text(bar.times + 1.35, y, bar.said, va="center", fontsize=11)
    axis.axvline(1, color="black", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(rows)), [bar.what for bar in rows], fontsize=12)
    axis.set(xlim=(0, 14.8), xticks=[], ylim=(len(rows) - 0.5, -0.6))
    axis.tick_params(length=0)
    axis.grid(False)
    axis.spines[["bottom", "left"]].set_visible(False)
    figure.suptitle("“8.32 times as fast as GRPO”? It depends on what you count",
                    x=0.01, ha="left", fontsize=15, fontweight="bold")
    figure.supxlabel("GRPO's seconds divided by CPPO's; dotted line: as fast as GRPO; "
                     "H100: the shape of a 1.5B model", fontsize=10)
    figure.savefig(path, dpi=100)


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    draw(ROOT / "docs/speedups.png")
    print("written: docs/speedups.png")


if __name__ == "__main__":
    main(sys.argv[1:])
