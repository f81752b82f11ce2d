"""What the notebooks share: the source of a function, a table, the style of the figures, and the
figures themselves.

Import it before the project's modules: it puts the project's folder on Python's path.
"""

import inspect
import io
import json
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the project's folder
sys.path.insert(0, str(ROOT))
# of tqdm, if there are no notebook widgets
warnings.filterwarnings("ignore", message="IProgress not found")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from IPython.display import Image, display  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap  # noqa: E402
from PIL import Image as Pixels  # noqa: E402

torch.set_num_threads(1)  # several threads make such small tensors slower
torch.set_printoptions(precision=2, sci_mode=False)
F64 = torch.float64
equal = np.testing.assert_allclose
GREY, BLUE, PALE, WARM = "#848e9a", "#1d4f8f", "#9db7d8", "#b1452b"  # GRPO, CPPO, paler, it fails
LIGHT, DARK = "#dde2e7", "#3b434c"
BARS = [LIGHT, BLUE, GREY, PALE, DARK]
CYCLE = [BLUE, GREY, DARK, PALE, WARM]  # C0 to C4
STYLE = {
    "savefig.dpi": 90, "font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8,
    "hatch.linewidth": 0.6, "grid.alpha": 0.3, "axes.axisbelow": True,
    "axes.prop_cycle": plt.cycler(color=CYCLE),
}


def show(*functions):
    """The source of these functions as it is in the project's files today. A viewer without
    Markdown shows the same code as plain text."""
    for function in functions:
        file = Path(inspect.getsourcefile(function)).relative_to(ROOT)
        source = inspect.getsource(function)
        code = {
            "text/markdown": f"`{file}`\n\n```python\n{source}```",
            "text/plain": f"# {file}\n\n{source}",
        }
        display(code, raw=True)


def table(columns, digits=2):
    """Prints {title: values} side by side. digits: of numbers that are not whole."""
    def word(x):
        x = x.tolist() if isinstance(x, torch.Tensor) else x
        if isinstance(x, list):
            return ", ".join(map(word, x))
        return f"{x:.{digits}f}" if isinstance(x, float) else str(x)

    columns = [[title, *map(word, values)] for title, values in columns.items()]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        print("   ".join(text.rjust(width) for text, width in zip(row, widths)))


def cosine(a, b):
    """1: the same direction. 0: no common direction. −1: the opposite."""
    return torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)


def stored(name):
    """The rows of a table in experiments/results, by their names."""
    rows = json.loads((ROOT / f"experiments/results/{name}.json").read_text())["rows"]
    return {row["name"]: row for row in rows}


# --- the parts of a figure ---


def panels(columns=1, height=3.2, *, rows=1, width=9.6, grid=True, **options):
    """A figure and its axes."""
    plt.rcdefaults()  # a program of the project that a notebook imports has another style
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), constrained_layout=True, **options
    )
    for axis in np.ravel(axes):
        axis.grid(grid)
    return figure, axes


def picture(figure):
    """Show a figure, in 32 colours: so that a notebook with its pictures stays a small file."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, bbox_inches="tight")
    plt.close(figure)
    Pixels.open(full).convert("RGB").quantize(32).save(small, format="PNG", optimize=True)
    display(Image(small.getvalue()))


def curves(axis, x, lines, styles, **options):
    """One line for each entry of `lines`: {label: y}. That of GRPO is grey, that of CPPO blue."""
    own = {label: GREY for label in lines if "GRPO" in label}
    own |= {label: BLUE for label in lines if "CPPO" in label}
    others = [colour for colour in CYCLE if colour not in own.values()]
    for (label, y), style in zip(lines.items(), styles):
        colour = own[label] if label in own else others.pop(0)
        drawn = {"color": colour, "markerfacecolor": "white", "label": label}
        axis.plot(x, y, style, **drawn | options)
    axis.legend()


def bars(axis, x, groups, **options):
    """Bars side by side, one colour for each entry of `groups`: {label: heights}."""
    width = 0.8 / len(groups)
    for i, ((label, y), colour) in enumerate(zip(groups.items(), BARS)):
        place = np.asarray(x) + (i - (len(groups) - 1) / 2) * width
        axis.bar(place, y, width, color=colour, edgecolor=DARK, label=label, **options)


def stacked(axis, names, parts, *, across=True, at=0.0, width=0.8, labels=True):
    """Bars of several parts, {label: lengths}: across the page, or upwards."""
    place, start = np.arange(len(names)) + at, np.zeros(len(names))
    for (label, y), colour in zip(parts.items(), BARS):
        style = {"color": colour, "edgecolor": DARK, "linewidth": 0.7}
        style["label"] = label if labels else None
        if across:
            axis.barh(place, y, width, left=start, **style)
        else:
            axis.bar(place, y, width, bottom=start, **style)
        start = start + np.asarray(y)
    if across:
        axis.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    return start


def plain_ticks(axis, *, x=(), y=()):
    """Ticks at these numbers, written as numbers: for logarithmic scales."""
    axis.minorticks_off()
    if len(x):
        axis.set_xticks(x, labels=[f"{tick:g}" for tick in x])
    if len(y):
        axis.set_yticks(y, labels=[f"{tick:g}" for tick in y])


# --- figures ---


def chart(title, x, lines, **labels):
    """A line for each entry of `lines`, {label: y}; few points are marked. labels: of the axes."""
    figure, axis = panels(height=3, width=6.5)
    styles = ("o-", "s--", "^-", "D-") if len(x) < 25 else ("-", "-", "-", "-")
    curves(axis, x, lines, styles, markersize=4)
    axis.set(title=title, **labels)
    picture(figure)


def bar_chart(title, names, groups, **labels):
    """Bars side by side for each name. groups: {label: heights}."""
    figure, axis = panels(height=2.8, width=7)
    bars(axis, range(len(names)), groups)
    axis.set_xticks(range(len(names)), names)
    axis.axhline(0, color=DARK, linewidth=0.8)
    axis.set(title=title, **labels)
    axis.legend()
    picture(figure)


def dots(title, groups, **labels):
    """A dot for each pair of numbers. groups: {label: (all x, all y)}. labels: of the axes."""
    figure, axis = panels(height=3, width=6.5)
    for (label, (x, y)), colour in zip(groups.items(), (BLUE, PALE)):
        axis.plot(x, y, "o", color=colour, label=label)
    axis.set(title=title, ylim=(0, 1), **labels)
    axis.legend()
    picture(figure)


def tokens(title, names, words, values):
    """A square for each token: blue above 0, red below, white at 0.

    words: of each row, a letter for each token. values: (N, T).
    """
    figure, axis = panels(height=0.9 + 0.45 * len(names), width=6, grid=False)
    colours = LinearSegmentedColormap.from_list("", [WARM, "white", BLUE])
    end = 2 * values.abs().max()  # pale enough to read the numbers
    axis.imshow(values, cmap=colours, vmin=-end, vmax=end, aspect="auto")
    for i, row in enumerate(words):
        for t, word in enumerate(row):
            axis.text(t, i, f"{word}   {values[i, t]:+.3f}", ha="center", va="center")
    axis.set(title=title, xlabel="token", xticks=range(values.shape[1]))
    axis.set_yticks(range(len(names)), names)
    picture(figure)


def charts(title, lines, *, xlabel):
    """A small picture for each entry of `lines`, {label: y}, side by side."""
    figure, axes = panels(len(lines), 2.6)
    for axis, (label, y) in zip(axes, lines.items()):
        axis.plot(y, color=BLUE)
        axis.set(title=label, xlabel=xlabel)
    figure.suptitle(title, fontsize=11)
    picture(figure)


def factors(title, names, parts, kept):
    """The completions of a step, one bar each; below each other {label: numbers}. Blue: kept."""
    figure, axes = panels(height=4.2, rows=len(parts), width=8, sharex=True)
    colours = [BLUE if i in kept else LIGHT for i in range(len(names))]
    for axis, (label, y) in zip(axes, parts.items()):
        axis.bar(range(len(names)), y, color=colours, edgecolor=DARK)
        axis.set_ylabel(label)
    axis.set_xticks(range(len(names)), names)
    figure.suptitle(title, fontsize=11)
    picture(figure)


def lanes(title, xlabel, rows, ends=()):
    """A bar of blocks for each entry of `rows`, {name: [(length, colour), …]}.

    ends: of each lane; what its blocks leave free is hatched.
    """
    figure, axis = panels(height=0.7 + 0.24 * len(rows), width=8, grid=False)
    for y, blocks in enumerate(rows.values()):
        x = 0.0
        for length, colour in blocks:
            axis.barh(y, length, left=x, color=colour, edgecolor=DARK, linewidth=0.7)
            x += length
        if len(ends) and ends[y] > x:
            axis.barh(y, ends[y] - x, left=x, color="white", edgecolor=GREY, hatch="////")
    axis.set(title=title, xlabel=xlabel, ylim=(len(rows) - 0.4, -0.6))
    axis.set_yticks(range(len(rows)), rows)
    picture(figure)


def rectangles(title, cuts):
    """Micro-batches and their padding, for each way to cut: {name: [[length of each row], …]}."""
    figure, axes = panels(len(cuts), 3.6, sharex=True, sharey=True, grid=False)
    for axis, (name, batches) in zip(axes, cuts.items()):
        y = 0
        for rows in batches:
            for length in rows:
                axis.barh(y, max(rows), color="white", edgecolor=GREY, hatch="////", height=1)
                axis.barh(y, length, color=PALE, edgecolor=DARK, height=1)
                y += 1
            y += 1
        axis.set(title=name, xlabel="tokens", yticks=[])
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    picture(figure)


# --- the figures of 4_training.ipynb, 5_family.ipynb and lab.ipynb ---


def line_figure(x, lines, styles=("-", "--", ":", "-."), *, fails=(), **options):
    """Curves, {label: y}. fails: the labels of those that are wrong. options: of the axis."""
    figure, axis = panels(height=2.8, width=6.5)
    curves(axis, x, lines, styles)
    for line in axis.lines:
        if line.get_label() in fails:
            line.set_color(WARM)
    axis.set(**options)
    axis.legend()
    picture(figure)


def bar_figure(names, groups, **options):
    """Bars, {label: heights}, side by side above each name. options: of the axis."""
    figure, axis = panels(height=2.8, width=6.5)
    groups = {label: [float(height) for height in y] for label, y in groups.items()}
    bars(axis, range(len(names)), groups)
    axis.axhline(0, color=DARK, linewidth=0.8)
    axis.set_xticks(range(len(names)), labels=names)
    axis.set(**options)
    axis.legend()
    picture(figure)


def runs_compared(runs):
    """runs: {name: (seconds after each step, accuracy of each step, {phase: seconds})}."""
    figure, axes = panels(2, 3.2, width_ratios=(3, 2))
    ends = [f"{name} {seconds[-1]:.0f} s" for name, (seconds, *_) in runs.items()]
    tallest = max(seconds[-1] for seconds, *_ in runs.values())
    for i, (name, (seconds, accuracy, phases)) in enumerate(runs.items()):
        colour, style = [(GREY, "-"), (PALE, "-"), (BLUE, "-"), (DARK, "--")][i % 4]
        window = max(1, len(accuracy) // 10)
        means = np.convolve(accuracy, np.ones(window) / window, mode="valid")
        axes[0].plot(seconds[window - 1 :], means, style, color=colour, linewidth=2, label=name)
        top = 0
        for (phase, length), alpha in zip(phases.items(), (0.8, 0.2, 0.6, 0.4)):
            axes[1].bar(i, length, bottom=top, color=colour, alpha=alpha, edgecolor=DARK)
            if length > 0.06 * tallest:
                text = axes[1].text(i, top + length / 2, phase, ha="center", va="center")
                text.set(fontsize=7.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
            top += length
    axes[0].set(xlabel="seconds", ylabel="accuracy of the samples")
    axes[0].set_title("The same questions take " + ", ".join(ends))
    axes[0].legend(loc="lower right")
    axes[1].set(ylabel="seconds", xticks=range(len(runs)), xticklabels=list(runs))
    axes[1].set_title("Where the seconds go")
    picture(figure)
