"""Pictures: `curves.png` of a run, and one picture of several runs."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from engine.run import logs  # noqa: E402

PANELS = [  # (metric, title)
    ("accuracy", "accuracy (sampled, training questions)"),
    ("reward", "reward"),
    ("length", "completion length (tokens)"),
    ("kl", "KL(π ‖ π_ref), estimate k3"),
    ("clip_fraction", "clip fraction"),
    ("no_signal", "share of groups without signal"),
    ("entropy", "entropy per token, estimate (nats)"),
    ("grad_norm", "gradient norm, before clipping"),
]
STYLES = ["-", "--", ":", "-."]
HATCHES = ["", "//", "..", "xx", "--"]
PHASES = ["generate", "score", "logprobs", "update", "other"]


def smooth(values, window):
    """The mean over the last `window` values, because single steps are noisy."""
    return [
        sum(values[max(0, i - window + 1) : i + 1]) / len(values[max(0, i - window + 1) : i + 1])
        for i in range(len(values))
    ]


def curves(run_dirs, output):
    """Draw the runs' metrics against the questions trained on.

    A thin line shows single steps, a thick line the mean over a twentieth of the run.
    """
    names = [Path(d).name for d in run_dirs]
    runs = {
        name if names.count(name) == 1 else str(d): logs.read(Path(d) / "metrics.jsonl")
        for name, d in zip(names, run_dirs)
    }
    figure, axes = plt.subplots(3, 3, figsize=(14, 10))
    # fixed margins are faster than a computed layout
    figure.subplots_adjust(left=0.04, right=0.99, top=0.97, bottom=0.05, wspace=0.15, hspace=0.3)
    for axis, (metric, title) in zip(axes.flat, PANELS):
        for i, (name, rows) in enumerate(runs.items()):
            seen, questions = 0, []
            for row in rows:
                seen += row["questions"]
                questions.append(seen)
            series = [metric]
            if metric == "reward" and len(runs) == 1:  # a single run: each of its rewards, too
                rewards = [key for key in rows[0] if key.startswith("reward/")]
                series += rewards if len(rewards) > 1 else []
            for j, key in enumerate(series):
                points = [(x, row[key]) for x, row in zip(questions, rows) if row.get(key) is not None]
                if not points:
                    continue
                x, y = zip(*points)
                style, color = STYLES[(i + j) % len(STYLES)], f"C{i + j}"
                axis.plot(x, y, color=color, alpha=0.2, linewidth=0.8)
                label = name if key == metric else key.removeprefix("reward/")
                axis.plot(x, smooth(y, max(1, len(y) // 20)), style, color=color, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("questions", fontsize=9)
        axis.grid(alpha=0.3)
        if len(axis.lines) > 2:
            axis.legend(fontsize=8)

    totals = [logs.phase_totals(rows) for rows in runs.values()]
    stacked(axes.flat[-1], list(runs), totals, PHASES[:-1])
    axes.flat[-1].set_title("seconds by phase", fontsize=10)
    save(figure, output)


def stacked(axis, names, phases, parts):
    """Draw one bar per name, made of `parts`. phases: for each name, {part: height}."""
    bottoms = [0.0] * len(names)
    for part, hatch in zip(parts, HATCHES):
        heights = [row.get(part, 0.0) for row in phases]
        axis.bar(names, heights, bottom=bottoms, label=part, hatch=hatch, edgecolor="white", width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    axis.legend(fontsize=8)


def save(figure, output):
    figure.savefig(output, dpi=80)
    plt.close(figure)
