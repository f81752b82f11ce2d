"""One runner for the experiments: settings × seeds, the figures of each run, and one page.

A study has settings, {name: options}, and a measure, which makes the figures of one setting with
one seed: numbers, or a list (a curve). All settings are measured with one seed, then all with the
next. So if the machine is slow for a while, it is slow for all settings. Finished runs are kept in
the study's folder: to continue after an interruption, run the same command again.

The result has a row for each setting, {"name": …, figure: its spread over the seeds}, and the page
is a table of these rows.
"""

import contextlib
import io
import json
import math
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from tqdm import tqdm

import train
from engine.base import files
from engine.base.errors import UserError
from engine.options.command_line import flat, option, parse_given
from engine.options.config import Config, config_of
from engine.run import checkpoint
from engine.run.folder import options_of
from experiments.library.bench import markdown_table, over_seeds, setting

PHASES = ("generate", "score", "logprobs", "update", "other")
RESULTS = "runs/results"


@dataclass
class Options:
    output: str = option(RESULTS, "folder of the page, of its figures and of its pictures")


class Study(NamedTuple):
    folder: str  # of its runs
    settings: dict  # {name: what `measure` is told}
    measure: object  # (folder of this run, setting, seed) → {figure: number, text or list}
    seeds: tuple = (1, 2, 3)

    def place(self, name, seed):
        """The folder of one run."""
        return Path(self.folder, name_of(name, seed))


def name_of(name, seed):
    """The file or folder of a run."""
    return f"{name}, seed {seed}".replace(", ", "-").replace(" ", "-").replace("/", "over")


def runs_of(study):
    """{name: [the figures of each seed]}"""
    found = {name: [] for name in study.settings}
    jobs = list(product(study.seeds, study.settings.items()))
    for seed, (name, chosen) in tqdm(jobs, study.folder):
        found[name].append(study.measure(study.place(name, seed), chosen, seed))
    return found


def rows_of(study):
    """[{"name": …, figure: its spread over the seeds; of a text or a list: that of each seed}]"""
    return [{"name": name} | over_seeds(runs) for name, runs in runs_of(study).items()]


def by_name(rows):
    return {row["name"]: row for row in rows}


def once(file, make):
    """What `make()` has found. It is kept in a JSON file."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, json.dumps(make()))
    return json.loads(file.read_text())


# --- a run of train.py ---


def words_of(options):
    """The command line that has these options."""
    words = []
    for name, value in options.items():
        several = value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, several)]
    return words


def one_run(folder, options):
    """The figures of one run. A finished run is read, an interrupted run is resumed, a missing run
    is trained."""
    words = words_of(options | {"output_dir": folder})
    if (folder / "run.json").is_file():
        if options_of(folder) != flat(config_of(parse_given(Config, words))[0]):
            raise UserError(
                f"{folder} holds a run with other options: remove it, and it is made anew."
            )
        if checkpoint.checkpoints(folder):  # else it was killed before its first step
            words.append("--resume")
    if not (folder / "summary.json").exists():
        with contextlib.redirect_stdout(io.StringIO()):
            code = train.main(words)
        if code or not (folder / "summary.json").exists():  # Ctrl-C, or SIGTERM
            print("Finished runs are kept: the same command goes on from here.")
            sys.exit(code or 130)
    return figures(folder)


def figures(folder):
    """Of a finished run."""
    summary, config = json.loads((folder / "summary.json").read_text()), options_of(folder)
    metrics = files.read_lines(folder / "metrics.jsonl")
    points, phases, after = curve(metrics), summary["phases"], summary["after"]
    reached = [point[:2] for point in points if point[2] >= 0.85] or [(math.inf, math.inf)]
    phases["other"] = phases["total"] - sum(phases[name] for name in PHASES[:-1])
    chosen, counted = ("group_size", "pruning_rate"), (
        "k", "seconds", "questions", "completions", "tokens_generated", "tokens_trained")
    return {name: config[name] for name in chosen} | {name: summary[name] for name in counted} | {
        "questions_per_step": summary["per_step"], "steps": summary["step"],
        "base": summary["before"]["sampled"]["accuracy"],
        "greedy": after["greedy"]["accuracy"], "sampled": after["sampled"]["accuracy"],
        "length": after["sampled"]["length"],
        "no_signal": fmean(row["frac_reward_zero_std"] for row in metrics),
        "no_update": summary["steps_without_signal"] / summary["step"],
        "reached": reached[0],  # (seconds, completions) at the accuracy 0.85
        "phases": phases, "curve": points,
    }


def curve(metrics):
    """Accuracy during training: rows of (seconds, completions, accuracy), at most 200 of them.

    Every training question is new to the policy. The accuracy is the mean over the last 64
    questions or more; in a run of fewer than 256 questions, over the last quarter of them or more.
    """
    rows, window, width = [], [], min(64, math.ceil(sum(row["questions"] for row in metrics) / 4))
    seconds = completions = 0
    for row in metrics:
        seconds, completions = seconds + row["seconds/total"], completions + row["completions"]
        window.append((row["questions"], row["accuracy"]))
        while sum(q for q, _ in window[1:]) >= width:
            window.pop(0)
        total = sum(q for q, _ in window)
        if total >= width:
            mean = sum(q * a for q, a in window) / total
            rows.append((round(seconds, 3), completions, mean))
    return rows[:: math.ceil(len(rows) / 200)]


def mean_over(rows, name):
    """Of a metric, over the steps that have it: a step without an update has no KL."""
    values = [row[name] for row in rows if row[name] is not None]
    return fmean(values) if values else math.nan


# --- the page ---


def cell(value, form=""):
    """A figure in words: a spread as mean ± standard deviation, or as median (min to max). form:
    of a number."""
    if value is None:
        return "–"
    if isinstance(value, list):
        return " · ".join(cell(one, form) for one in value)
    if not isinstance(value, dict):
        return value if isinstance(value, str) else format(value, form)
    if "median" in value:
        centre, low, high = (format(value[key], form) for key in ("median", "min", "max"))
        return f"{centre} ({low} to {high})"
    return f"{format(value['mean'], form)} ± {format(value['std'], form)}"


def lines_of(rows, columns):
    """The lines of a table: a row for each setting. columns: {title: (figure, form)}, or {figure:
    form}, or one form for all figures."""
    if isinstance(columns, str):
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: columns for name in names if name != "name"}
    lines = [["", *columns]]
    for row in rows:
        lines.append([row["name"]])
        for title, column in columns.items():
            figure, form = column if isinstance(column, tuple) else (title, column)
            lines[-1].append(cell(row.get(figure), form))
    return lines


def pivot(rows, columns):
    """A row for each setting. columns: see `lines_of`."""
    return markdown_table(lines_of(rows, columns))


def grid(corner, names, columns, show):
    """A table of what `show` says of each name and each column."""
    lines = [[name, *(show(name, column) for column in columns)] for name in names]
    return markdown_table([[corner, *columns], *lines])


def publish(output, name, result, page, picture=None, packages=()):
    """Write NAME.json, the page NAME.md and the pictures, if there are any, with what they were
    made with. packages: whose versions are told."""
    draw(output, name, setting(*packages) | result, page, picture)


def draw(output, name, result, page, picture):
    """The same of a stored result."""
    folder, text = Path(output), page(result)
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / f"{name}.json", json.dumps(result) + "\n")
    files.write(folder / f"{name}.md", text)
    print(f"{text}\nwritten: {folder / name}.json and .md")
    if picture:
        picture(result, folder)
