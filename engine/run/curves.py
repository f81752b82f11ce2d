"""`curves.png`: the picture of a run. The colours of the methods in all pictures of the project."""

from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

from engine.base import files
from engine.run.metrics import WORDS, mean, phase_totals

GRPO, CPPO, FAILS = "#848e9a", "#1d4f8f", "#b1452b"
PANELS = {  # metric: title of its panel
    "accuracy": "accuracy of the samples",
    "length": "tokens of a completion",
    "entropy": "entropy of a token (nats)",
}
SHADES = {"generate": "#c3cad2", "score": "#848e9a", "logprobs": "#dfe3e8", "update": "#9db6d6"}
DPI = 80


def curves(folder, algorithm):
    """Draw metrics of a run against the questions that it was trained on, and the seconds of each
    phase: `curves.png`. Metrics of the user have panels of their own.

    A thin line shows single steps. A thick line shows the mean over a twentieth of the run. Points
    show the greedy accuracy of --eval_every.
    """
    rows = files.read(Path(folder, "metrics.jsonl"))
    questions = list(accumulate(row["questions"] for row in rows))
    figure, axes, strip = page(rows[0], "questions")
    colour = GRPO if algorithm == "grpo" else CPPO
    for name, axis in axes.items():
        values = [row.get(name) for row in rows]
        means = smooth(values)
        axis.plot(questions, values, color=colour, alpha=0.3, linewidth=0.8)
        axis.plot(questions, means, color=colour, linewidth=2.5)
        axis.set_title(f"{axis.get_title()}: {means[0]:.2g} → {means[-1]:.2g}")
    points = [(x, row["eval_accuracy"]) for x, row in zip(questions, rows)
              if row.get("eval_accuracy") is not None]
    if points:
        axes["accuracy"].plot(*zip(*points), "o", color=colour, mfc="white", label="greedy")
        axes["accuracy"].legend()
    draw_seconds(strip, 0, phase_totals(rows))
    figure.savefig(Path(folder, "curves.png"), dpi=DPI)


def page(row, x):
    """(figure, {metric: panel}, strip): large panels above a strip. row: of the metrics. x: what
    the x axis shows."""
    titles = PANELS | {name: name for name in row if name.startswith("own/")}
    figure = Figure((4.7 * len(titles), 5.4))
    # fixed margins are faster than a computed layout
    figure.subplots_adjust(left=0.05, right=0.98, top=0.93, bottom=0.03, hspace=0.35)
    axes = figure.subplot_mosaic([[*titles], ["seconds"] * len(titles)], height_ratios=[6, 1])
    strip = axes.pop("seconds")
    strip.set_axis_off()
    strip.margins(x=0)
    for name, axis in axes.items():
        axis.set_title(titles[name])
        axis.set_xlabel(x)
        axis.grid(alpha=0.3)
    return figure, axes, strip


def draw_seconds(axis, y, seconds):
    """Draw a bar of the seconds of each phase, with its name in it if there is room."""
    left = 0.0
    for phase, shade in SHADES.items():
        width = seconds[phase]
        axis.barh(y, width, left=left, color=shade)
        if width > seconds["total"] / 7:
            axis.text(left, y, f" {WORDS[phase]} {width:.0f} s", va="center")
        left += width


def smooth(values):
    """Of each step the mean over the last twentieth of the run, because single steps are noisy."""
    window = max(1, len(values) // 20)
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
