"""`curves.png`: the picture of a run. The colours of the methods in all pictures of the project."""

from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

from engine.base import files
from engine.run.metrics import mean

GRPO, CPPO, FAILS = "#848e9a", "#1d4f8f", "#b1452b"
PANELS = {  # metric: title of its panel, below that of the measure
    "length": "tokens of a completion",
    "entropy": "entropy of a token (nats)",
}
DPI = 80


def curves(folder, algorithm, measure="accuracy", tested=()):
    """Draw metrics of a run against the questions that it was trained on: `curves.png`. Metrics of
    the user have panels of their own.

    A thin line shows single steps. A thick line shows the mean over a twentieth of the run. Points
    show the greedy accuracy of --eval_every. measure: "accuracy" or "reward". tested: what it was
    before and after training, in words: the title of its panel, if the run was evaluated.
    """
    rows = files.read(Path(folder, "metrics.jsonl"))
    questions = list(accumulate(row["questions"] for row in rows))
    colour = GRPO if algorithm == "grpo" else CPPO
    own = {name: name for name in rows[0] if name.startswith("own/")}
    titles = {measure: f"{measure} of the samples"} | PANELS | own
    figure = Figure((4.7 * len(titles), 4.7))
    # fixed margins are faster than a computed layout
    figure.subplots_adjust(left=0.05, right=0.98, top=0.89, bottom=0.11)
    axes = figure.subplots(1, len(titles))
    for axis, name in zip(axes, titles):
        values = [row.get(name) for row in rows]
        means = smooth(values)
        axis.plot(questions, values, color=colour, alpha=0.3, linewidth=0.8)
        axis.plot(questions, means, color=colour, linewidth=2.5)
        axis.set_title(f"{titles[name]}: {means[0]:.2g} → {means[-1]:.2g}")
        axis.set_xlabel("questions")
        axis.grid(alpha=0.3)
    if tested:
        axes[0].set_title("\n".join(tested), fontsize="medium")
        axes[0].set_ylabel(f"{measure} of the samples")
    axes[0].plot(
        questions, [row.get(f"eval_{measure}") for row in rows], "o", color=colour, mfc="white")
    figure.savefig(Path(folder, "curves.png"), dpi=DPI)


def smooth(values):
    """Of each step the mean over the last twentieth of the run, because single steps are noisy."""
    window = max(1, len(values) // 20)
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
