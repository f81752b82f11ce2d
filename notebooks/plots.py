"""What the notebooks share: the source of a function, two comparisons, the style of the figures,
a few plots; and the figures of the first notebook.

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
from IPython.display import Image, display  # noqa: E402
from PIL import Image as Pixels  # noqa: E402

torch.set_num_threads(1)  # several threads make such small tensors slower
F64 = torch.float64
equal = np.testing.assert_allclose
GREY, BLUE, PALE, WARM = "#848e9a", "#1d4f8f", "#9db7d8", "#b1452b"  # GRPO, CPPO, paler, it fails
LIGHT, DARK = "#dde2e7", "#3b434c"
BARS = [LIGHT, BLUE, GREY, PALE, DARK]
CYCLE = [BLUE, GREY, DARK, PALE, WARM]  # C0 to C4
plt.rcParams.update({
    "savefig.dpi": 90, "font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8,
    "hatch.linewidth": 0.6, "grid.alpha": 0.3, "axes.axisbelow": True,
    "axes.prop_cycle": plt.cycler(color=CYCLE),
})


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


def twice(axis, x, written, computed, function):
    """The same numbers twice: bars are those of the formula, written out; crosses are those of the
    function."""
    axis.bar(x, written, color=LIGHT, edgecolor=GREY, label="written out")
    axis.plot(x, computed, "x", color=BLUE, markersize=8, label=function)


def plain_ticks(axis, *, x=(), y=()):
    """Ticks at these numbers, written as numbers: for logarithmic scales."""
    axis.minorticks_off()
    if len(x):
        axis.set_xticks(x, labels=[f"{tick:g}" for tick in x])
    if len(y):
        axis.set_yticks(y, labels=[f"{tick:g}" for tick in y])


# --- the figures of 1_grpo.ipynb ---


def two_temperatures(names, written, computed):
    """{temperature: the probability of each completion}, twice."""
    figure, axes = panels(2, 2.9, sharey=True)
    for axis, temperature in zip(axes, written):
        twice(axis, names, written[temperature], computed[temperature], "grpo.token_logprobs")
        axis.set(xlabel="completion o (two tokens)", title=f"Temperature {temperature}")
    axes[0].set(ylabel=r"$\pi_\theta(o)$")
    axes[1].set(title="At temperature 0.5 the likely ones become likelier")
    axes[0].legend()
    picture(figure)


def variance_by_baseline(variance, points, measured, J, best):
    """variance: a function of the baseline."""
    figure, axis = panels(width=7)
    grid = np.linspace(-0.5, 3, 71)
    axis.plot(grid, [variance(b) for b in grid], color=BLUE, label="exact, from all completions")
    axis.plot(points, measured, "o", color=BLUE, markerfacecolor="white", label="20,000 samples")
    for b, name, colour, side in (
        (0, "no baseline", WARM, "left"), (J, "b = E[r]", DARK, "left"),
        (best, "best b", GREY, "right"),
    ):
        axis.axvline(b, color=colour, linestyle=":")
        axis.text(b, 4.4, f" {name}: {variance(b):.2f} ", color=colour, ha=side)
    axis.set(xlabel="baseline b", ylabel="variance of the gradient")
    axis.set_title("With the mean reward as baseline the variance is less than half")
    axis.legend(loc="lower left")
    picture(figure)


def variance_by_group_size(sizes, no_baseline, mean_reward, measured, exact):
    """The variance of one sample without a baseline and with E[r]; {G: with the group's mean}."""
    figure, axes = panels(2, 3.4)
    G, measured = np.array(sizes), np.array([measured[G] for G in sizes])
    axes[0].plot(G, no_baseline / G, color=WARM, label="no baseline")
    axes[0].plot(G, mean_reward / G, color=GREY, label="baseline E[r]")
    axes[0].plot(G, measured, "o", color=BLUE, markerfacecolor="white", label="the group's mean")
    axes[0].plot(list(exact), list(exact.values()), "+", color=BLUE, markersize=9, label="exact")
    axes[0].set(yscale="log", ylabel="variance of the gradient")
    axes[0].set_title("In a larger group its mean is almost as good as E[r]")
    axes[1].plot(G, measured / (mean_reward / G), "o-", color=BLUE, markerfacecolor="white")
    axes[1].axhline(no_baseline / mean_reward, color=WARM, linestyle=":")
    axes[1].text(32, no_baseline / mean_reward, "no baseline", color=WARM, ha="right", va="bottom")
    axes[1].text(5, 1.5, "the group's mean", color=BLUE)
    axes[1].set(ylabel="variance / variance with E[r]")
    axes[1].set_title("Here a group of two is worse than no baseline")
    for axis in axes:
        axis.set(xscale="log", xlabel="group size G")
        plain_ticks(axis, x=sizes)
    axes[0].legend()
    picture(figure)


def two_gradients(gradients, cosines):
    """{rewards: {label: gradient}}, scaled to the same length."""
    figure, axes = panels(3, 3.1, sharey=True)
    for axis, (name, two) in zip(axes, gradients.items()):
        bars(axis, range(12), {label: g / np.linalg.norm(g) for label, g in two.items()})
        axis.set(xlabel="parameter", title=f"{name}: cosine {cosines[name]:.4f}", xticks=range(12))
    axes[0].set_ylabel("gradient, scaled to length 1")
    axes[0].legend()
    figure.suptitle("Only a rare, large reward turns the gradient", fontsize=11)
    picture(figure)


def weight_by_pass_rate(rates, weight):
    """{whether the std divides: the weight of a question with this pass rate}."""
    figure, axis = panels(width=7)
    axis.plot(rates, 1 / np.sqrt(rates * (1 - rates)), ":", color=GREY)
    axis.plot(rates, weight[True], color=BLUE)
    axis.plot(rates, weight[False], "--", color=DARK)
    axis.text(0.1, 4.2, r"$1/\sqrt{p(1-p)}$", color=GREY)
    axis.text(0.5, 1.55, "(r − mean) / std", color=BLUE, ha="center")
    axis.text(0.5, 0.6, "r − mean: 1 − 1/G", color=DARK, ha="center")
    axis.set(xlabel="pass rate p", ylabel="weight c(p)", ylim=(0, 6))
    axis.set_title("If we divide by the std, hard and easy questions weigh more (G = 16)")
    picture(figure)


def four_cases_of_the_clip(rho, values):
    """{A: the surrogate and its gradient at each ratio}."""
    figure, axes = panels(2, 5.2, rows=2, sharex=True)
    for column, (A, both) in enumerate(values.items()):
        dead = (1.2, 1.8) if A > 0 else (0.4, 0.8)
        for axis, y in zip(axes[:, column], both):
            for a, b in ((0.4, 0.8), (0.8, 1.2), (1.2, 1.8)):  # it jumps at the ends of the clip
                part = (rho > a) & (rho < b)
                axis.plot(rho[part], y[part], color=WARM if (a, b) == dead else BLUE, linewidth=2)
            axis.axvspan(*dead, color=WARM, alpha=0.08)
            for end in (0.8, 1.2):
                axis.axvline(end, color=GREY, linestyle=":")
        axes[0, column].plot(rho, rho * A, "--", color=GREY, linewidth=0.8)
        axes[0, column].text(*((1.3, 1.6) if A > 0 else (0.42, -0.62)), r"$\rho A$", color=GREY)
        axes[1, column].text(
            sum(dead) / 2, 0.4 * A, "no\ngradient", color=WARM, ha="center", va="center")
        back = (0.6, -0.2, "gradient:\nback up") if A > 0 else (1.5, 0.2, "gradient:\nback down")
        axes[1, column].text(*back, color=BLUE, ha="center", va="center")
        axes[1, column].set(xlabel=r"ratio $\rho$", ylim=(-1.25, 1.25))
    axes[0, 0].set(ylabel="L", title="A > 0: the clip acts only above 1 + ε")
    axes[0, 1].set(title="A < 0: the clip acts only below 1 − ε")
    axes[1, 0].set(ylabel=r"$\partial L / \partial \rho$")
    picture(figure)


KL_STYLES = {"k1": ("-", 4, PALE), "k2": ("--", 1.5, GREY), "k3": ("-", 1.5, BLUE)}


def three_estimators(true, mean, std):
    """{k1, k2 or k3: its mean, or its standard deviation, at each true KL}."""
    figure, axes = panels(2, 3.5)
    for k, (style, width, colour) in KL_STYLES.items():
        line = {"color": colour, "linewidth": width, "label": k}
        axes[0].plot(true, np.array(mean[k]) - true, style, **line)
        axes[1].plot(true, std[k], style, **line)
    axes[0].set(ylabel="bias: E[k] − KL", title="k1 and k3 are unbiased, k2 is not")
    axes[1].set(ylabel="standard deviation of one sample", yscale="log")
    axes[1].set_title("Near the reference k3 varies less than k1")
    for axis in axes:
        axis.set(xlabel=r"true KL$(\pi \Vert \pi_{ref})$", xscale="log")
        axis.legend()
    picture(figure)


def three_losses(of_loss, forward, reverse, true, cosines):
    """The gradient of k1, k2 and k3 as losses, beside those of the two KL divergences."""
    figure, axes = panels(2, 3.6, width_ratios=(2, 1))
    x = np.arange(8)
    for i, (k, gradient) in enumerate(of_loss.items()):
        place, colour = x + (i - 1) * 0.27, KL_STYLES[k][2]
        axes[0].bar(place, gradient, 0.27, color=colour, label=f"{k} as a loss")
    mark = {"markersize": 8, "markeredgewidth": 2, "color": DARK}
    axes[0].plot(x, forward, "_", label=r"$\nabla$KL$(\pi\Vert\pi_{ref})$", **mark)
    axes[0].plot(x + 0.27, reverse, "x", label=r"$\nabla$KL$(\pi_{ref}\Vert\pi)$", **mark)
    axes[0].set(xlabel="logit", ylabel="expected gradient", xticks=x)
    axes[0].set_title("k1 gives 0, k2 one KL, k3 the other KL (s = 1)")
    axes[0].legend()
    axes[1].plot(true, cosines, color=BLUE)
    axes[1].set(xlabel=r"true KL$(\pi \Vert \pi_{ref})$", xscale="log")
    axes[1].set(ylabel=r"cosine of k3's with $\nabla$KL$(\pi\Vert\pi_{ref})$")
    axes[1].set_title("Near the reference they agree")
    picture(figure)


def tokens_beside_the_sequence(of_sequence, of_tokens, between):
    figure, axis = panels(height=3, width=8)
    axis.bar(np.arange(12) - 0.2, of_sequence, 0.4, color=BLUE, label="k2 of the sequence = KL")
    axis.bar(np.arange(12) + 0.2, of_tokens, 0.4, color=WARM, label="k2, summed over tokens")
    axis.axvline(2.5, color=GREY, linestyle=":")
    axis.text(1, 0.22, "logits of the first token", ha="center", color=DARK)
    axis.set(xlabel="parameter", ylabel="expected gradient", xticks=range(12))
    axis.set_title(
        f"The sum over tokens does not see what the first token causes: cosine {between:.3f}"
    )
    axis.legend()
    picture(figure)


def weights_of_tokens(weights, lengths):
    figure, axis = panels(height=2.8, width=6.5, grid=False)
    axis.imshow(weights, cmap="Blues", vmax=0.5)
    for i, n in enumerate(lengths):
        for t in range(max(lengths)):
            text = f"{weights[i, t]:.3f}" if t < n else "–"
            axis.text(t, i, text, ha="center", va="center")
    axis.set(xlabel="token t", ylabel="completion i", yticks=range(len(lengths)))
    axis.set_yticklabels([f"|o| = {n}" for n in lengths])
    axis.set_title("Each completion weighs 1/4, and its tokens share that weight")
    picture(figure)


def gradient_of_each_token(tokens, written, computed, clipped, loss):
    """tokens: their names. clipped: numbers of those that the clip acts on."""
    figure, axis = panels(height=3.1, width=9)
    twice(axis, tokens, written, computed, "autograd of grpo.grpo_loss")
    for j in clipped:
        axis.text(j, 0.005, "clipped", color=WARM, ha="center", va="bottom", rotation=90)
    axis.set(xlabel="completion i, token t", ylabel=r"$\partial$ loss / $\partial \log\pi_{it}$")
    axis.set_title(f"Eq. 3, token by token: loss {loss:.4f}; clipped tokens keep only the KL part")
    axis.legend()
    picture(figure)


def reward_and_two_losses(runs):
    """{β: the history of a training}."""
    figure, axes = panels(3, 3.1)
    for axis, part in zip(axes, ("reward", "first", "second")):
        for (name, run), colour in zip(runs.items(), (GREY, BLUE)):
            axis.plot(run[part], color=colour, linewidth=1.1, label=name)
        axis.set(xlabel="batch")
        axis.legend()
    axes[0].set(ylabel="expected reward (exact)", title="The policy gets better ...")
    axes[1].set(ylabel="loss, first update", title="... while the loss is 0 or rises")
    axes[2].set(ylabel="loss, second update", title="The second loss moves away")
    picture(figure)
