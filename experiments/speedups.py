"""The picture of the README: how many times as fast as GRPO is CPPO? It depends on what is counted.

    python experiments/speedups.py --output experiments/results

Nothing is run. Each number but the paper's is computed from a stored result.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.run.command_line import option, parse, run_program
from engine.run.curves import FAILS, GRPO
from experiments.library.plot import PALER, panels, save
from experiments.library.study import RESULTS, by_name
from experiments.real import reached
from experiments.reproduce import PAPER

ROOT = Path(__file__).parents[1]
GOAL, WINDOW = 0.85, 512  # the film's accuracy, a mean over so many completions


class Bar(NamedTuple):
    what: str  # is counted
    times: float  # as fast as GRPO
    colour: str
    said: str = ""


def stored(name):
    return json.loads((ROOT / f"experiments/results/{name}.json").read_text(encoding="utf-8"))


def rows_of(name):
    return by_name(stored(name)["rows"])


def filmed():
    """The seconds of the film until GRPO is right 85 times in 100, and until CPPO is."""
    found = []
    for run in json.loads((ROOT / "docs/live/earlier.json").read_text(encoding="utf-8")):
        steps = run["steps"]
        window = WINDOW // (run["settings"]["group_size"] * run["settings"]["questions_per_step"])
        for end in range(window, len(steps) + 1):
            accuracy = fmean(accuracy for _, accuracy, *_ in steps[end - window : end])
            if accuracy >= GOAL:
                found.append(steps[end - 1][0])
                break
    return found


def bars():
    table1, together, controls = map(rows_of, ("table1", "together", "controls"))
    gpu = {row[""]: row for row in stored("gpu")["parts"]["protocol"]["rows"]}
    trl = stored("vs_trl_prompt150")
    most, usual = table1["P=0.9375"], table1["P=0.875"]
    grpo, cppo = controls["GRPO"], controls["CPPO, P=0.875"]

    def less(row):
        return f"{table1['GRPO']['sampled']['mean'] - row['sampled']['mean']:.2f} less accurate"

    def a_question(name):
        seconds = median(step["total"] for step in trl["seconds"][name])
        return seconds / trl["questions_per_step"][name]

    batches = together["GRPO, 8 mini-batches"], together["CPPO, P=0.875"]
    fair = median(a / b for a, b in zip(*(row["seconds"]["values"] for row in batches)))
    slow, fast = grpo["seconds_to_85"], cppo["seconds_to_85"]
    film_slow, film_fast = filmed()
    real = [median(reached(rows_of("real")[name])) for name in ("GRPO", "CPPO, P=0.75")]
    share = grpo["completions_to_85"] / cppo["completions_to_85"]
    blue, dark, pale = PALER["P=0.875"], PALER["P=0.9375"], PALER["P=0.75"]
    return [
        Bar("the paper: GSM8K, P = 0.9375", PAPER[0.9375][2], GRPO, "published as 8.32"),
        Bar("one H100, the shape of a 1.5B model, P = 0.9375",
            gpu["CPPO, P = 0.9375"]["speed-up"], dark, "only speed was measured"),
        Bar("… P = 0.875", gpu["CPPO, P = 0.875"]["speed-up"], blue),
        Bar("… if GRPO, too, samples 16 questions together",
            gpu["CPPO, P = 0.875"]["beside GRPO, 16 together"], blue, "the fair pair"),
        Bar("the toy on a CPU, P = 0.9375", most["speedup"]["median"], dark, less(most)),
        Bar("… P = 0.875", usual["speedup"]["median"], blue, less(usual)),
        Bar("… if GRPO, too, samples 8 questions together", fair, blue, "the fair pair"),
        Bar("… if we count the seconds until 85 of 100 are right", slow / fast, blue,
            f"{fast:.1f} and {slow:.1f} s"),
        Bar("… the same in the film, in a browser", film_slow / film_fast, blue,
            f"{film_fast:.0f} and {film_slow:.0f} s"),
        Bar("a model of 0.4M parameters, prompts of 150 tokens",
            a_question("grpo") / a_question("cppo"), blue),
        Bar("a model of 135M parameters, until 50 of 100 are right", real[0] / real[1], pale,
            "P = 0.75; three seeds show no difference"),
        Bar("the toy, counted in sampled answers", share, FAILS,
            f"CPPO needs {1 / share:.1f} times as many"),
    ]


def draw(path):
    figure, axis = panels(1, height=5.6, width=12)
    rows = bars()
    for y, bar in enumerate(rows):
        axis.barh(y, bar.times, color=bar.colour, height=0.68)
        axis.text(bar.times + 0.12, y, f"{bar.times:.1f}", va="center", fontweight="bold")
        axis.text(bar.times + 0.9, y, bar.said, va="center")
    axis.axvline(1, color="black", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(rows)), [bar.what for bar in rows])
    axis.set(xlim=(0, 15), xticks=[], ylim=(len(rows) - 0.5, -0.6))
    axis.grid(False)
    axis.spines[["bottom", "left"]].set_visible(False)
    save(figure, path, "GRPO's seconds divided by CPPO's; dotted line: as fast as GRPO",
         title="“8.32 times as fast as GRPO”? It depends on what you count")


@dataclass
class Options:
    output: str = option(RESULTS, "folder of the picture")


def main(argv):
    path = Path(parse(Options, argv).output, "speedups.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(path)
    print(f"written: {path}")


if __name__ == "__main__":
    run_program(main)
