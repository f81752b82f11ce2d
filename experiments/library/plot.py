"""Three kinds of picture: dots of seeds, curves with bands, and bars of phases."""

from matplotlib import rcParams
from matplotlib.figure import Figure

from algorithms import ALGORITHMS
from engine.base import progress
from engine.report.curves import CPPO, DPI, FAILS, GRPO, INK, band, styles

# The colours of all pictures. GRPO is grey. CPPO is blue, and nothing else is. What fails is warm.
# All else is ink, or a tint of it
OTHER, TINT = "#4a535d", "#98a2ae"
PHASES = {  # of a step, and their tints
    "generate": "#c9ced5", "score": OTHER, "logprobs": "#e3e6ea", "update": TINT,
    "other": "#f2f4f6",
}
# CPPO: the less it prunes, the paler
PALER = {"P=0.5": "#a3bcd9", "P=0.75": "#6c93c0", "P=0.875": CPPO, "P=0.9375": "#0e2c53"}
# how the names of CPPO's rows begin
OF_CPPO = ("cppo", "p=", "largest_abs", "1/|o|, largest", "token mean, pooled", "both", "published",
           "as published")
FAILING = ("judge", "trained on results")  # words in the names of what fails
PALE = (GRPO, TINT, PALER["P=0.5"], PALER["P=0.75"])  # text in them has less than 4.5 : 1 on white
LEARNED = 0.55  # accuracy of a toy that has learned something; the base: 0.39 greedy, 0.43 sampled
LABELS = {
    "greedy": "accuracy, greedy", "sampled": "accuracy, sampled", "seconds": "seconds of training",
    "length": "tokens of a completion", "kl_to_base": "KL to the base (nats per completion)",
}
WORDS = {  # of a row: what the pictures call it. Other algorithms have capital letters
    "largest_abs": "largest |A|", "smallest_abs": "smallest |A|", "largest": "largest A",
    "pooled": "largest |A| of the step", "unbiased": "drawn, unbiased", "2grpo": "2-GRPO",
    "cppo_published": "CPPO, published code", "drgrpo": "Dr. GRPO", "lite_ppo": "Lite PPO",
    "maxrl": "MaxRL", "gspo_token": "GSPO-token", "gfpo_adaptive": "GFPO, adaptive k",
    "deepseek_v32": "DeepSeek-V3.2", "gspo + cppo": "GSPO + CPPO", "grpo + nat": "GRPO + NAT",
    "cppo + nat": "CPPO + NAT", "1 passes": "1 pass",
}
ACCURACIES = ("greedy", "sampled")
STEP = 0.062  # from the name of a line to the next one, in heights of a panel
BAND = "line and band: mean, lowest and highest of the seeds"


rcParams.update({
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "text.color": INK, "font.size": 11, "axes.labelsize": 10, "axes.titlesize": 12,
    "savefig.dpi": DPI,
})


def in_words(name):
    """The name of a row, as a reader says it: "largest_abs, P=0.5" is "largest |A|, P = 0.5"."""
    parts = [WORDS.get(part) or (part.upper() if part in ALGORITHMS else part)
             for part in name.split(", ")]
    return ", ".join(parts).replace("P=", "P = ").replace("G=", "G = ")


def colour(name):
    """GRPO is grey and CPPO is blue, and paler if it prunes less. What fails is warm."""
    parts = name.split(", ")
    if any(word in name for word in FAILING):
        return FAILS
    if name.lower().startswith(OF_CPPO):
        return next((PALER[part] for part in parts if part in PALER), CPPO)
    return GRPO if parts[0].lower() in ("grpo", "rule") else INK


# --- a figure and its panels ---


def panels(count, height=5.0, width=14.0, **options):
    """(figure, its panels side by side)"""
    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots(1, count, **options)


def save(figure, output, text):
    """text: below all panels."""
    figure.supxlabel(text, fontsize=10, color=OTHER)
    figure.savefig(output)


def name_lines(axis, lines):
    """Write the names of lines to the right of a panel, one below the other, each joined to the
    height of its line's end. lines: {name: line}."""
    axis.get_ylim()  # now the limits are known
    places, height = axis.transScale + axis.transLimits, -1.0
    ends = {name: places.transform((0, line.get_ydata()[-1]))[1] for name, line in lines.items()}
    for left, name in zip(range(len(ends))[::-1], sorted(ends, key=ends.get)):
        height = min(max(ends[name], height + STEP, 0.03), 0.97 - STEP * left)
        own, style = lines[name].get_color(), lines[name].get_linestyle()
        joint = {"arrowstyle": "-", "color": own, "linestyle": style, "linewidth": 2,
                 "relpos": (0, 0.5)}
        axis.annotate(name, (1.01, ends[name]), (1.07, height), "axes fraction", va="center",
                      color=INK if own in PALE else own, arrowprops=joint)


def name_rows(axis, rows):
    """Write the names of rows to the left of a panel, the first one on top."""
    axis.set_yticks(range(len(rows)), [in_words(row["name"]) for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.grid(False, axis="y")


# --- dots. rows: those of a study, with a spread for each figure ---


def of_seed(row, key, value):
    """The colour of one seed: FAILS if it has learned nothing."""
    accuracy = value if key in ACCURACIES else row["sampled"]["mean"]
    return FAILS if accuracy < LEARNED else colour(row["name"])


def dots(axis, rows, key, title, left):
    """A line for each row: its mean and standard deviation, and a dot for each seed.

    left: where the axis begins; a row whose mean lies before that gets a number in its place.
    """
    for y, row in enumerate(rows):
        mean, std = row[key]["mean"], row[key]["std"]
        values = row[key].get("values", [mean])  # older results have no figures of single seeds
        colours = [of_seed(row, key, value) for value in values]
        if left is not None and mean < left:
            axis.text(left, y, f" ◂ {mean:.2f}", color=colours[0], va="center")
            continue
        above = min(std, 1 - mean) if key in ACCURACIES else std
        axis.errorbar(mean, y, xerr=[[std], [above]], fmt="|", color="black", markersize=13,
                      ecolor="#c3cad2", elinewidth=5, zorder=1)
        axis.scatter(values, [y] * len(values), color=colours, s=42, alpha=0.85, zorder=2)
    axis.set(title=title, xlabel=LABELS[key])
    axis.set_xlim(left=0 if key == "seconds" else left)
    name_rows(axis, rows)


def methods(rows, output, titles, left=None):
    """A panel of dots for each of several figures; the figure "phases" has a panel of bars.

    titles: {figure: title of its panel}. left: where the axis of the first figure begins. If it is
    given, the method with the largest mean of this figure is above.
    """
    first = next(iter(titles))
    if left is not None:
        rows = sorted(rows, key=lambda row: -row[first]["mean"])
    figure, axes = panels(len(titles), 1.5 + len(rows) / 3.2, sharey=True)
    for axis, (key, title) in zip(axes, titles.items()):
        if key == "phases":
            bars(axis, rows, title)
        else:
            dots(axis, rows, key, title, left if key == first else None)
    seeds = "dots: seeds" if "values" in rows[0][first] else "dots: means"  # of older results
    save(figure, output, f"{seeds}; line and band: mean ± standard deviation of the seeds")


# --- bars ---


def bars(axis, rows, title):
    """The seconds of training of each row by phase, and its speed-up."""
    totals = [sum(row["phases"][phase] for phase in progress.WORDS) for row in rows]
    longest = max(totals)
    for y, row in enumerate(rows):
        start = 0.0
        for phase, shade in PHASES.items():
            width = row["phases"][phase]
            axis.barh(y, width, left=start, color=shade, height=0.7)
            if totals[y] == longest and width > longest / 7:
                axis.text(start, y, f" {progress.WORDS[phase]}", va="center")
            start += width
        axis.text(start, y, f"  {row['speedup']['median']:.2f}×", va="center", fontweight="bold")
    axis.set(xlim=(0, 1.2 * longest), title=title,
             xlabel="seconds: sampling, scoring, log-probabilities, update, other")
    name_rows(axis, rows)


# --- curves. A curve is a list of points (x, …, y, …) ---


def curves(axis, lines, named=True, marker="", **labels):
    """A band for each line, and its name at its end. lines: {name: curves of its seeds}. labels:
    title, xlabel and others of the panel."""
    own, drawn = list(map(colour, lines)), {}
    for (name, of_seeds), color, style in zip(lines.items(), own, styles(own)):
        line = band(axis, of_seeds, 0, color, style)
        line.set_marker(marker)
        drawn[in_words(name)] = line
    axis.set(**labels)
    if named:
        name_lines(axis, drawn)


def across(spreads):
    """The curve of each seed through several spreads: points (0, …), (1, …), …"""
    return [list(enumerate(values)) for values in zip(*(of["values"] for of in spreads))]


def time_to_accuracy(rows, output):
    """Accuracy on training questions, which are new to the policy, against time and against
    completions. The dots: when the seeds reach 0.85, in the median."""
    figure, axes = panels(2, 5.2, sharey=True)
    sides = (
        ("seconds_to_85", 30, "seconds of training", "By the clock, CPPO is ahead", ": {:.1f} s"),
        ("completions_to_85", 20_000, "completions sampled",
         "By the answers it samples, GRPO is ahead", ": {:,.0f}"),
    )
    for column, (axis, (key, end, x, title, words)) in enumerate(zip(axes, sides)):
        axis.axhline(0.85, color="#c3cad2", linewidth=1, zorder=0)
        for row in rows:
            own, name = colour(row["name"]), in_words(row["name"]).replace("P =", "CPPO, P =")
            line = band(axis, row["curves"], column, own)
            if row[key]:  # else 0.85 was not reached
                axis.plot(row[key], 0.85, "o", color=own, markersize=9, zorder=5)
                name += words.format(row[key])
            line.set_label(name)
        axis.legend(loc="lower right", frameon=False)
        axis.set(xlim=(0, end), xlabel=x, title=title)
    axes[0].set_ylabel("accuracy, sampled (moving mean)")
    save(figure, output, f"{BAND}; dot and number: where 0.85 is reached (median)")
