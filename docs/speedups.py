"""Draws docs/speedups.png, the picture of the README: how many times as fast as GRPO is CPPO? It
depends on what is counted.

    python docs/speedups.py

Nothing is run. Each number but the paper's is computed from a stored result.
"""

import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.report.curves import CPPO, FAILS, GRPO  # noqa: E402
from experiments.library.plot import PALER, panels  # noqa: E402
from experiments.library.study import by_name  # noqa: E402
from experiments.library.train_for import reached  # noqa: E402
from experiments.reproduce import PAPER  # noqa: E402

GOAL, WINDOW = 0.85, 512  # the accuracy that the film waits for: the mean of so many completions


class Bar(NamedTuple):
    what: str  # is counted
    times: float  # as fast as GRPO
    said: str = ""
    colour: str = CPPO  # the usual P = 0.875


def stored(name):
    return json.loads((ROOT / f"{name}.json").read_text(encoding="utf-8"))


def result(name):
    return stored(f"experiments/results/{name}")


def pair(study, key, grpo="GRPO", cppo="CPPO, P=0.875"):
    """What two rows of a study have measured."""
    rows = by_name(result(study)["rows"])
    return rows[grpo][key], rows[cppo][key]


def bars():
    paper = Bar("the paper: GSM8K, P = 0.9375", PAPER[0.9375][2], "8.32 in print", GRPO)
    return [paper, *of_the_gpu(), *of_the_toy(), of_the_film(), of_long_prompts(),
            of_a_real_model(), in_answers()]


def of_the_gpu():
    rows = {row[""]: row for row in result("gpu")["parts"]["protocol"]["rows"]}
    most, usual = rows["CPPO, P = 0.9375"], rows["CPPO, P = 0.875"]
    together = usual["beside GRPO, 16 together"]
    return [
        Bar("H100, P = 0.9375", most["speed-up"], "speed alone", PALER["P=0.9375"]),
        Bar("H100, P = 0.875", usual["speed-up"], "speed alone"),
        Bar("H100, P = 0.875; GRPO 16 together", together, "CPPO 8 together"),
    ]


def of_the_toy():
    def bar(name):
        _, speedup = pair("table1", "speedup", cppo=name)
        grpo, cppo = pair("table1", "sampled", cppo=name)
        said = f"{grpo['mean'] - cppo['mean']:.2f} less accurate"
        return Bar(f"toy, {name.replace('=', ' = ')}", speedup["median"], said, PALER[name])

    grpo, cppo = pair("together", "seconds", grpo="GRPO, 8 mini-batches")
    fair = median(a / b for a, b in zip(grpo["values"], cppo["values"]))
    slow, fast = pair("controls", "seconds_to_85")
    return [
        bar("P=0.9375"), bar("P=0.875"),
        Bar("toy, P = 0.875; GRPO, too, 8 together", fair, "the fair pair"),
        Bar("toy, P = 0.875, until 85 of 100 are right", slow / fast,
            f"{fast:.1f} and {slow:.1f} s"),
    ]


def of_the_film():
    slow, fast = map(seconds_to_goal, stored("docs/live/earlier"))
    return Bar("toy, the same in a browser", slow / fast, f"{fast:.0f} and {slow:.0f} s")


def seconds_to_goal(run):
    """Of a run of the live page, whose steps are (seconds, accuracy, …)."""
    settings = run["settings"]
    window = WINDOW // (settings["group_size"] * settings["questions_per_step"])
    seconds, accuracies, *_ = zip(*run["steps"])
    return next(seconds[end - 1] for end in range(window, len(seconds) + 1)
                if fmean(accuracies[end - window : end]) >= GOAL)


def of_long_prompts():
    found = result("vs_trl_prompt150")

    def seconds(name):
        of_step = median(step["total"] for step in found["seconds"][name])
        return of_step / found["questions_per_step"][name]

    return Bar("prompts of 150 tokens, P = 0.875", seconds("grpo") / seconds("cppo"))


def of_a_real_model():
    curves = pair("real", "curves", cppo="CPPO, P=0.75")
    grpo, cppo = (median(reached(of_seeds, 0.5, 480)) for of_seeds in curves)
    return Bar("SmolLM2-135M, until 50 of 100 are right", grpo / cppo,
               "P = 0.75: three seeds show no difference", PALER["P=0.75"])


def in_answers():
    grpo, cppo = pair("controls", "completions_to_85")
    said = f"CPPO needs {cppo / grpo:.1f} times as many"
    return Bar("toy, counted in sampled answers", grpo / cppo, said, FAILS)


def draw(path):
    figure, axis = panels(1, height=5.6, width=9.6)
    what, times, said, colours = zip(*bars())
    drawn = axis.barh(what, times, color=colours, height=0.68)
    axis.bar_label(drawn, fmt="%.1f", padding=4, fontsize=12, fontweight="bold")
    for y, words in enumerate(said):
        axis.text(times[y] + 1.35, y, words, va="center", fontsize=11)
    axis.axvline(1, color="black", linestyle=":", linewidth=1)
    axis.set(xlim=(0, 14.8), xticks=[], ylim=(len(what) - 0.5, -0.6))
    axis.tick_params(length=0, labelsize=12)
    axis.grid(False)
    axis.spines[["bottom", "left"]].set_visible(False)
    figure.suptitle("“8.32 times as fast as GRPO”? It depends on what you count",
                    x=0.01, ha="left", fontsize=15, fontweight="bold")
    figure.supxlabel("GRPO's seconds divided by CPPO's; dotted line: as fast as GRPO; "
                     "H100: the shape of a 1.5B model", fontsize=10)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    if sys.argv[1:]:  # --help
        print(__doc__)
    else:
        draw(ROOT / "docs/speedups.png")
        print("written: docs/speedups.png")
