"""Curves of one run, or of several on one picture.

    python plot.py runs/toy-cppo-1                            writes curves.png into the run
    python plot.py runs/toy-grpo-1 runs/toy-cppo-1 --output compared.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from engine import logs  # noqa: E402
from engine.options import UserError, run  # noqa: E402

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


def smooth(values, window):
    """Mean over the last `window` values: single steps are noisy."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / len(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def curves(run_dirs, output):
    """Draw the runs' metrics against the questions trained on. Thin: single steps; thick: mean over a twentieth of the run."""
    names = [Path(d).name for d in run_dirs]
    runs = {name if names.count(name) == 1 else str(d): logs.read(Path(d) / "metrics.jsonl") for name, d in zip(names, run_dirs)}
    figure, axes = plt.subplots(3, 3, figsize=(14, 10), constrained_layout=True)
    for axis, (metric, title) in zip(axes.flat, PANELS):
        for i, (name, rows) in enumerate(runs.items()):
            seen, questions = 0, []
            for row in rows:
                seen += row["questions"]
                questions.append(seen)
            series = [metric]
            if metric == "reward" and len(runs) == 1:  # one run: its reward's parts too
                parts = [key for key in rows[0] if key.startswith("reward/")]
                series += parts if len(parts) > 1 else []
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

    axis, hatches = axes.flat[-1], ["", "//", "..", "xx", "--"]
    bottoms = [0.0] * len(runs)
    totals = [logs.phase_totals(rows) for rows in runs.values()]
    for j, phase in enumerate(["generate", "score", "logprobs", "update"]):
        heights = [total.get(phase, 0.0) for total in totals]
        axis.bar(list(runs), heights, bottom=bottoms, label=phase, hatch=hatches[j], edgecolor="white", width=0.5)
        bottoms = [b + h for b, h in zip(bottoms, heights)]
    axis.set_title("seconds by phase", fontsize=10)
    axis.legend(fontsize=8)
    figure.savefig(output, dpi=80)
    plt.close(figure)


def main(argv):
    parser = argparse.ArgumentParser(description="Curves of one run, or of several on one picture.")
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--output", help="the picture's path; none: curves.png in the first run's folder")
    args = parser.parse_args(argv)
    for folder in args.runs:
        if not (Path(folder) / "metrics.jsonl").exists() or not logs.read(Path(folder) / "metrics.jsonl"):
            raise UserError(f"{folder} holds no run with at least one step (metrics.jsonl).")
    output = args.output or Path(args.runs[0]) / "curves.png"
    curves(args.runs, output)
    print(f"written: {output}")


if __name__ == "__main__":
    run(main)
