"""What the five notebooks share: the source of a function, two comparisons, the style of the
figures, a few plots.

Import it before the project's modules: it puts the project's folder on Python's path.
"""

import inspect
import io
import math
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
from IPython.display import Image, Markdown, display  # noqa: E402
from PIL import Image as Pixels  # noqa: E402

torch.set_num_threads(1)  # several threads make such small tensors slower
F64 = torch.float64
equal = np.testing.assert_allclose
plt.rcParams.update({
    "savefig.dpi": 90, "font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8,
    "hatch.linewidth": 0.6, "grid.alpha": 0.3, "axes.axisbelow": True,
})
# colour and hatch
BARS = [("white", ""), ("lightgrey", "//"), ("grey", ".."), ("0.9", "xx"), ("black", "")]


def show(*functions):
    """The source of these functions as it stands in the project's files today."""
    for function in functions:
        file = Path(inspect.getsourcefile(function)).relative_to(ROOT)
        display(Markdown(f"`{file}`\n\n```python\n{inspect.getsource(function)}```"))


# --- comparisons ---


def cosine(a, b):
    """1: the same direction. 0: no common direction. −1: the opposite."""
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def within_5_standard_errors(samples, exact):
    """The mean of independent samples (rows) must lie within 5 standard errors of the exact
    value."""
    error = np.abs(samples.mean(axis=0) - exact)
    assert np.all(error <= 5 * samples.std(axis=0, ddof=1) / math.sqrt(len(samples)) + 1e-12), error


# --- figures ---


def panels(columns=1, height=3.2, *, rows=1, width=9.6, grid=True, **options):
    """A figure and its axes."""
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
    """One line for each entry of `lines`: {label: y}."""
    for (label, y), style in zip(lines.items(), styles):
        axis.plot(x, y, style, **{"markerfacecolor": "white", "label": label} | options)
    axis.legend()


def bars(axis, x, groups, **options):
    """Bars side by side, one colour for each entry of `groups`: {label: heights}."""
    width = 0.8 / len(groups)
    for i, ((label, y), (color, hatch)) in enumerate(zip(groups.items(), BARS)):
        place = np.asarray(x) + (i - (len(groups) - 1) / 2) * width
        axis.bar(
            place, y, width, color=color, edgecolor="black", hatch=hatch, label=label, **options
        )


def stacked(axis, names, parts, *, across=True, at=0.0, width=0.8, labels=True):
    """Bars of several parts, {label: lengths}: across the page, or upwards."""
    place, start = np.arange(len(names)) + at, np.zeros(len(names))
    for (label, y), (color, hatch) in zip(parts.items(), BARS):
        style = {"color": color, "hatch": hatch, "edgecolor": "black", "linewidth": 0.7}
        style["label"] = label if labels else None
        if across:
            axis.barh(place, y, width, left=start, **style)
        else:
            axis.bar(place, y, width, bottom=start, **style)
        start = start + np.asarray(y)
    if across:
        axis.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    return start


def twice(axis, x, written, computed, function):
    """The same numbers twice: bars are those of the formula, written out; crosses are those of the
    function."""
    axis.bar(x, written, color="lightgrey", edgecolor="black", hatch="//", label="written out")
    axis.plot(x, computed, "kx", markersize=8, label=function)


def plain_ticks(axis, *, x=(), y=()):
    """Ticks at these numbers, written as numbers: for logarithmic scales."""
    axis.minorticks_off()
    if len(x):
        axis.set_xticks(x, labels=[f"{tick:g}" for tick in x])
    if len(y):
        axis.set_yticks(y, labels=[f"{tick:g}" for tick in y])
