"""Draws docs/speedups.png, the picture of the README: how many times as fast as GRPO is CPPO? It
depends on what is counted.

    python docs/speedups.py

Nothing is run. Each number but the paper's is computed from a stored result.
"""

import json
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.report.curves import CPPO, FAILS, GRPO  # noqa: E402
from experiments.library.plot import PALER, panels  # noqa: E402
from experiments.library.study import by_name  # noqa: E402
from experiments.library.train_for import reached  # noqa: E402
from experiments.reproduce import PAPER  # noqa: E402

GOAL, WINDOW = 0.85, 512  # the accuracy that the film waits for: the mean of so many completions


def stored(name):
    return json.loads((ROOT / f"{name}.json").read_text(encoding="utf-8"))


def pair(study, key, grpo="GRPO", cppo="CPPO, P=0.875"):
    """What two rows of a study have measured."""
    rows = by_name(stored(f"experiments/results/{study}")["rows"])
    return rows[grpo][key], rows[cppo][key]


def bars():
    """(what is counted, how many times as fast as GRPO, what is said of it, colour) of each bar."""
    gpu = {row[""]: row for row in stored("experiments/results/gpu")["parts"]["protocol"]["rows"]}
    usual = gpu["CPPO, P = 0.875"]
    grpo, cppo = pair("together", "seconds", grpo="GRPO, 8 mini-batches")
    fair = median(a / b for a, b in zip(grpo["values"], cppo["values"]))
    slow, fast = pair("controls", "seconds_to_85")
    seen_slow, seen_fast = map(seconds_to_goal, stored("docs/live/earlier"))
    few, many = pair("controls", "completions_to_85")
    return [
        ("the paper: GSM8K, P = 0.9375", PAPER[0.9375][2], "8.32 in print", GRPO),
        ("H100, P = 0.9375", gpu["CPPO, P = 0.9375"]["speed-up"], "speed alone",
         PALER["P=0.9375"]),
        ("H100, P = 0.875", usual["speed-up"], "speed alone", CPPO),
        ("H100, P = 0.875; GRPO 16 together", usual["beside GRPO, 16 together"],
         "CPPO 8 together", CPPO),
        of_the_toy("P=0.9375"), of_the_toy("P=0.875"),
        ("toy, P = 0.875; GRPO, too, 8 together", fair, "the fair pair", CPPO),
        ("toy, P = 0.875, until 85 of 100 are right", slow / fast,
         f"{fast:.1f} and {slow:.1f} s", CPPO),
        ("toy, the same in a browser", seen_slow / seen_fast,
         f"{seen_fast:.0f} and {seen_slow:.0f} s", CPPO),
        ("prompts of 150 tokens, P = 0.875", of_long_prompts("grpo") / of_long_prompts("cppo"), "",
         CPPO),
        ("SmolLM2-135M, until 50 of 100 are right", of_a_real_model(),
         "P = 0.75: three seeds show no difference", PALER["P=0.75"]),
        ("toy, counted in sampled answers", few / many,
         f"CPPO needs {many / few:.1f} times as many", FAILS),
    ]


def of_the_toy(name):
    _, speedup = pair("table1", "speedup", cppo=name)
    grpo, cppo = pair("table1", "sampled", cppo=name)
    said = f"{grpo['mean'] - cppo['mean']:.2f} less accurate"
    return f"toy, {name.replace('=', ' = ')}", speedup["median"], said, PALER[name]


def seconds_to_goal(run):
    """Of a run of the live page, whose steps are (seconds, accuracy, …)."""
    settings = run["settings"]
    window = WINDOW // (settings["group_size"] * settings["questions_per_step"])
    seconds, accuracies, *_ = zip(*run["steps"])
    return next(now for end, now in enumerate(seconds, 1)
                if sum(accuracies[end - window : end]) >= GOAL * window)


def of_long_prompts(name):
    """Seconds of a question."""
    found = stored("experiments/results/vs_trl_prompt150")
    of_step = median(step["total"] for step in found["seconds"][name])
    return of_step / found["questions_per_step"][name]


def of_a_real_model():
    curves = pair("real", "curves", cppo="CPPO, P=0.75")
    grpo, cppo = (median(reached(of_seeds, 0.5, 480)) for of_seeds in curves)
    return grpo / cppo


def draw():
    figure, axis = panels(1, height=5.6, width=9.6)
    what, times, said, colours = zip(*bars())
    drawn = axis.barh(what, times, color=colours, height=0.68)
    axis.bar_label(drawn, fmt="%.1f", padding=4, fontsize=12, fontweight="bold")
    for y, words in enumerate(said):
        axis.text(times[y] + 1.35, y, words, va="center", fontsize=11)
    axis.axvline(1, color="black", linestyle=":", linewidth=1)
    axis.set(xlim=(0, 14.8), xticks=[], ylim=(len(what) - 0.5, -0.6), frame_on=False)
    axis.tick_params(length=0, labelsize=12)
    axis.grid(False)
    figure.suptitle("“8.32 times as fast as GRPO”? It depends on what you count",
                    x=0.01, ha="left", fontsize=15, fontweight="bold")
    figure.supxlabel("GRPO's seconds divided by CPPO's; dotted line: as fast as GRPO; "
                     "H100: the shape of a 1.5B model", fontsize=10)
    figure.savefig(ROOT / "docs/speedups.png", dpi=100)


if __name__ == "__main__":
    if sys.argv[1:]:  # --help
        print(__doc__)
    else:
        draw()
        print("written: docs/speedups.png")
