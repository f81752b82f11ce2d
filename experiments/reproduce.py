"""The tables of the CPPO paper (2503.22342), on the toy: what pruning saves, and where the time
goes.

    python experiments/reproduce.py --table 1 --seeds 3    pruning rates; accuracy against time
    python experiments/reproduce.py --table all            every table, one after the other
    python experiments/reproduce.py --quick                all of them, small, in about 5 minutes:
                                                           not a result

The protocol is the paper's, on a smaller task. G = 16, and a device trains on 16 completions in
each step, so GRPO takes one question per step and CPPO ⌊16/k⌋. Every method passes once over the
same questions, with the same learning rate, μ = 2, β = 0.04 and T = 1. Every run is `train.py` with
the options in its run.json, on one thread.

All methods run with one seed, then all with the next. So if the machine is slow for a while, it is
slow for all methods. A speed-up is a ratio within one seed. Finished runs are kept under
runs/reproduce/. To continue after an interruption, run the same command again. The pages go to
runs/results; `--output experiments/results` writes over the stored ones.
"""

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from algorithms import ALGORITHMS, constant, resolve, token_mean
from engine.base.errors import UserError
from engine.base.program import run_program
from engine.data.questions import load_questions
from engine.model.loading import load_model
from engine.model.logprobs import Policy
from engine.model.precision import choose_dtype
from engine.options.command_line import option, parse
from engine.options.config import config_of
from engine.run.folder import options_of
from engine.scoring.score import Reward
from experiments.library import plot, toy_model
from experiments.library.bench import (
    alone,
    every_second,
    growth,
    heading,
    networks_of,
    over_seeds,
    qwen,
    return_what_is_freed,
    spread,
    this_device,
)
from experiments.library.study import (
    PHASES,
    RESULTS,
    Study,
    grid,
    one_run,
    pivot,
    publish,
    runs_of,
)
from grpo import kl_k1
from loop.records import Parts
from loop.update import Limits
from tasks import toy
from train import train_step

RATES = (0.5, 0.75, 0.875, 0.9375)
RULES = Path(__file__).parent / "library/rules.py"
PROTOCOL = {
    "dataset": "toy", "questions_per_step": 1, "group_size": 16, "mu": 2, "minibatches": 1,
    "beta": 0.04, "temperature": 1.0, "lr": 1e-4,
}
PAPER = {
    0.0: (77.05, 23393, 1.0), 0.5: (77.67, 12930, 1.81), 0.75: (78.81, 7159, 3.27),
    0.875: (80.41, 4781, 4.89),
    # GSM8K accuracy, seconds, speed-up: Qwen2.5-1.5B-Instruct on two GPUs
    0.9375: (78.20, 2813, 8.32),
}


# --- the columns of a page: {title: (figure, form)} ---

USUAL = {
    "k": "", "questions per step": ("questions_per_step", ""),
    "greedy": ".3f", "sampled": ".3f", "tokens long": ("length", ".1f"),
    "seconds": ".1f", "speed-up (min to max)": ("speedup", ".2f"),
    "per token generated": ("speedup_per_token", ".2f"), "steps": "",
}
BOUND = {"Amdahl's bound": ("bound", ".2f")}
KL = {"KL to the base": ("kl_to_base", ".1f")}
PUBLISHED = {"paper: accuracy": "", "paper: seconds": "", "paper: speed-up": ""}
WORK = {
    "completions": "", "tokens generated": ("tokens_generated", ".0f"),
    "tokens trained": ("tokens_trained", ".0f"),
    **{f"seconds: {phase}": (phase, ".1f") for phase in PHASES},
    "groups without signal": ("no_signal", ".0%"), "steps without update": ("no_update", ".0%"),
    "seconds to accuracy 0.85": ("seconds_to_85", ".1f"),
    "completions to 0.85": ("completions_to_85", ".0f"),
}
MEMORY = {f"MB of a step: {part}": ".0f" for part in ("peak", "parameters", "optimizer")}


class Method(NamedTuple):
    options: dict  # of train.py, on top of PROTOCOL
    baseline: str = "GRPO"  # the method that its speed-up is measured against
    # the method that differs from it in the pruning alone, for Amdahl's law
    unpruned: str | None = None
    passes: float = 1  # over the questions of the table


class Table(NamedTuple):
    title: str
    questions: int  # of one pass
    methods: dict  # {name: Method}
    panels: dict  # of the picture: {figure: what the stored results show}
    columns: dict = {}  # of the page besides the usual ones
    measures: tuple = ()  # besides: kl (to the base), memory (of a step of a larger model)
    plan: str = ""  # what the page says first
    seeds: int = 3  # at least
    draw: Callable = plot.methods  # (rows, path, panels)


TABLES = {}


def grpo(**options):
    return Method({"algorithm": "grpo"} | options)


def cppo(rate, **options):
    return Method({"algorithm": "cppo", "pruning_rate": rate} | options)


def in_minibatches(methods, n):
    """n times the questions of a step, sampled together, and trained on in n mini-batches: as many
    updates as before."""
    found = {}
    for name, method in methods.items():
        questions = n * method.options.get("questions_per_step", 1)
        options = method.options | {"questions_per_step": questions, "minibatches": n}
        found[f"{name}, {n} mini-batches"] = method._replace(options=options)
    return found


def own(name, **more):
    """An algorithm with its own β, μ and mini-batches. It takes four questions per step, before
    allocation."""
    numbers = {key: getattr(resolve(name), key) for key in ("beta", "mu", "minibatches")}
    usual = {"algorithm": name, "questions_per_step": 4, "lr": 3e-4}
    return Method(usual | numbers | more, "grpo")


# --- the tables ---


pruned = {"GRPO": grpo()}
for p in RATES:
    pruned[f"P={p}"] = cppo(p)
TABLES["1"] = Table(
    "Table 1: pruning rates", 2048, pruned | in_minibatches(pruned, 4),
    {"sampled": "A larger P costs little accuracy …", "phases": "… and saves most of the time"},
    PUBLISHED)

# CPPO's two parts alone: pruning without allocation, and as many questions per step as CPPO has
methods = {"GRPO": grpo()}
for p in RATES:
    questions = round(1 / (1 - p))
    batch = f"larger batches alone, B={questions}"
    methods[f"pruning alone, P={p}"] = cppo(p, allocation=False)._replace(unpruned="GRPO")
    methods[batch] = grpo(questions_per_step=questions)
    methods[f"both, P={p}"] = cppo(p)._replace(unpruned=batch)
TABLES["speed"] = Table(
    "Where the speed comes from", 512, methods,
    {"sampled": "With few steps less is learned …", "phases": "… but only both parts are fast"},
    BOUND)

methods = {"GRPO": grpo()}
for p in (0.5, 0.875):
    for rule in ("largest_abs", "largest", "random", "smallest_abs", "pooled"):
        methods[f"{rule}, P={p}"] = cppo(p, keep=rule)
TABLES["keep"] = Table(
    "Which completions to keep", 1024, methods,
    {"greedy": "Greedy: only the largest A fails …",
     "sampled": "… sampled: the smallest |A| learns less, too"})

# the device trains on 16 completions in each step for every G; if G is larger than 16, on G of them
methods = {}
for g in (4, 8, 16, 32):
    size = {"group_size": g, "questions_per_step": max(1, 16 // g)}
    baseline = f"GRPO, G={g}"
    methods[baseline] = grpo(**size)._replace(baseline=baseline)
    methods[f"P=0.75, G={g}"] = cppo(0.75, **size)._replace(baseline=baseline)
TABLES["group"] = Table(
    "Group size", 1024, methods,
    {"sampled": "CPPO is as accurate as GRPO from G = 8 on …",
     "seconds": "… in about a third of the time"})

# every algorithm as in its paper, GSPO with CPPO's pruning, and random prefixes (NAT). 2-GRPO
# samples as many completions as the others, from 8 times as many questions
methods = {name: own(name) for name in ALGORITHMS}
methods["2grpo"] = own("2grpo", group_size=2, questions_per_step=32)._replace(passes=8)
methods["gspo + cppo"] = own("gspo", keep="largest_abs")
methods["grpo + nat"] = own("grpo", min_prefix=0.0)
methods["cppo + nat"] = own("cppo", min_prefix=0.0)
TABLES["family"] = Table(
    "The family", 1024, methods,
    {"sampled": "21 of 22 methods end within 0.05", "length": "They think as long …",
     "kl_to_base": "… and move as far"},
    KL, ("kl", "memory"), draw=partial(plot.methods, left=0.86))

# what else could explain CPPO's result. G = 2 passes eight times over the questions: as many
# completions
basic = {"GRPO": grpo(), "CPPO, P=0.875": cppo(0.875)}
methods = basic | in_minibatches(basic, 4) | {
    "as published, P=0.875": cppo(0.875, algorithm="cppo_published"),
    "GRPO, 8 questions": grpo(questions_per_step=8),
    "random, P=0.875": cppo(0.875, keep="random"),
    "one of each kind, P=0.875": cppo(0.875, keep=f"{RULES}:distinct"),
    "GRPO, G=2, 8 questions": grpo(group_size=2, questions_per_step=8)._replace(passes=8),
    "GRPO, lr × 2": grpo(lr=2 * PROTOCOL["lr"]),
    "CPPO, P=0.875, no allocation": cppo(0.875, allocation=False),
    "Dr. GRPO": grpo(algorithm="drgrpo"),
    "Dr. GRPO, P=0.875": cppo(0.875, algorithm="drgrpo", keep="largest_abs"),
}
TABLES["controls"] = Table(
    "Controls", 1024, methods,
    {"sampled": "All end between 0.86 and 0.92",
     "seconds": "Pruning with allocation takes a quarter of the time, or less"})

# how many mini-batches are best?
methods = {}
for name, method in basic.items():
    methods[name] = method
    for n in (2, 4, 8, 16):
        methods |= in_minibatches({name: method}, n)
TABLES["together"] = Table(
    "Sampling together is not training together", 1024, methods,
    {"sampled": "16 mini-batches harm CPPO, not GRPO",
     "seconds": "CPPO stays 2.5 times as fast, or more"})

PLAN = """
## Plan, written on 2026-11-23, before the runs

**Question.** CPPO is a choice (which completions are kept) with a loss (what divides a completion's
sum over its tokens). The published code has another loss and another choice than the paper. Which
of the two matters, and by how much?

**Runs.** The toy, P = 0.875, 8 questions a step, one pass over 1,024 questions, learning rate 1e-4,
the protocol of Table 1. Four losses: 1/|o| (the paper's), the token mean (the published code's), a
constant (1/48 for each completion), and the mean length of the group's 16 completions in place of
|o|. Five choices: the largest |A| of each question (the paper's), of the whole step (pooled, the
published code's), random, half of each sign, and importance. The last two draw completions with
unequal chances and count each with the inverse of its chance (experiments/library/rules.py).
20 cells, seeds 1 to 5 each.

**What counts.** The sampled accuracy on 512 held-out questions. The effect of a loss is the mean
over the five choices, and the other way round. A difference of two means counts if it is larger
than twice its standard error over the 5 seeds (paired by seed).
"""
LOSSES = ("1/|o|", "token mean", "constant", "mean |o| of the group")
CHOICES = {
    "largest |A|": "largest_abs", "pooled": "pooled", "random": "random",
    "half of each sign": f"{RULES}:half_of_each_sign", "importance": f"{RULES}:importance",
}
# rows of the table of algorithms that only the runs of `factorial` know: CPPO with another loss
OTHER_LOSSES = {
    f"cppo, {name}": replace(ALGORITHMS["cppo"], token_weights=weights)
    for name, weights in {"token mean": token_mean, "constant": constant}.items()
}
methods = {}
for loss, (choice, rule) in product(LOSSES, CHOICES.items()):
    algorithm = f"cppo, {loss}" if f"cppo, {loss}" in OTHER_LOSSES else "cppo"
    if loss == "mean |o| of the group":  # in place of |o_i|
        rule = f"{RULES}:{rule.split(':')[-1]}_by_group"
    method = cppo(0.875, algorithm=algorithm, keep=rule)
    methods[f"{loss}, {choice}"] = method._replace(baseline="1/|o|, largest |A|")
TABLES["factorial"] = Table(
    "Which of loss and choice matters", 1024, methods,
    {"sampled": "One pair fails: the largest |A| of the whole step with 1/|o|",
     "greedy": "Greedy, all other pairs are alike"},
    plan=PLAN, seeds=5)


# --- the figures of a table ---


def kl_to_base(folder, base):
    """KL(π ‖ π_base) of a finished run, in nats per completion.

    It is the mean of Σ_t k1 over 256 held-out questions, with one completion each.
    """
    model, tokenizer = load_model(folder, torch.device("cpu"))
    reference, _ = load_model(base, torch.device("cpu"))
    questions, _ = load_questions("toy", tokenizer, split="test", limit=256)
    longest = options_of(folder)["max_new_tokens"]
    batch, _ = toy_model.answered(model, tokenizer, questions, 1, 0, longest)
    with torch.no_grad():
        logp, ref_logp = Policy(model).logprobs(batch), Policy(reference).logprobs(batch)
    k1 = kl_k1(logp, ref_logp)
    return k1.sum(1).mean().item()


def amdahl(phases, share):
    """The largest speed-up that training on `share` of the completions allows: only some phases
    become shorter.

        speed-up ≤ T / (T_generate + T_score + T_other + share · (T_logprobs + T_update))

    phases: the seconds of the unpruned method.
    """
    pruned = phases["logprobs"] + phases["update"]
    return phases["total"] / (phases["total"] - pruned + share * pruned)


# the memory of a whole step: what a reference costs, and what a critic costs


def one_step(options, hidden_size, device):
    """Make the networks and one step with them on 16 kept completions (GFPO 8, PODS 4). Returns the
    bytes of [parameters, the optimizer's moments]."""
    config, algorithm = config_of(options | {"questions_per_step": 1, "max_new_tokens": 32})
    tokenizer = toy_model.make_tokenizer()
    questions, _ = load_questions("toy", tokenizer, limit=algorithm.questions_per_step)
    model = qwen(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=8,
        eos_token_id=tokenizer.eos_token_id,
    ).to(device)
    policy = Policy(model, choose_dtype("auto", device, 0))  # on every CPU float32
    networks = networks_of(policy, tokenizer, config, algorithm)
    reward, rng = Reward("every second", every_second), random.Random(1)
    train_step(Parts(networks, algorithm, [reward], config.sampling, Limits()), questions, rng)
    everything = [*networks.optimized_networks]
    if networks.master_weights:
        everything += networks.trained_networks
    if networks.reference:
        everything.append(networks.reference.model)
    parameters = [p for network in everything for p in network.parameters()]
    moments = [t for state in networks.optimizer.state.values() for t in state.values()]
    return [sum(t.nbytes for t in tensors) for tensors in (parameters, moments)]


def peak_of_step(job):
    options, hidden_size = job
    return_what_is_freed()
    torch.set_num_threads(1)
    device, held = this_device(), []
    one_step(options, 32, device)  # what the very first step allocates for good
    peak = growth(lambda: held.extend(one_step(options, hidden_size, device)), device)
    return {"parameters": held[0], "optimizer": held[1], "peak": peak}


def of_steps(methods, hidden_size=512):
    """{name: {parameters, optimizer, peak}} in bytes, of one step of a model with 26 million
    parameters. methods: {name: options of train.py}."""
    # a fork cannot use a GPU that its parent has used; without one it saves the seconds of a start
    start = "spawn" if torch.cuda.is_available() else "fork"
    jobs = [(options, hidden_size) for options in methods.values()]
    return dict(zip(methods, alone(peak_of_step, jobs, start)))


SAME = ("group_size", "pruning_rate", "k", "questions_per_step", "steps", "questions",
        "completions")  # for every seed


def summarize(methods, runs):
    """One row per method: mean and std over the seeds; the speed-up is the median of the ratios
    within a seed."""
    rows = []
    for name, method in methods.items():
        others = runs[method.baseline], runs.get(method.unpruned)
        rows.append({"name": name} | over_the_seeds(runs[name], *others))
    return rows


def over_the_seeds(own, base, unpruned):
    """The figures of one method. Each argument: the runs of a method, one of each seed."""
    row = over_seeds(own) | {key: own[0][key] for key in SAME}
    for key, values in zip(("seconds_to_85", "completions_to_85"), zip(*row.pop("reached"))):
        row[key] = median(values) if median(values) < math.inf else None
    row["phases"] = {phase: fmean(run["phases"][phase] for run in own) for phase in PHASES}
    row["curves"] = row.pop("curve")
    ratios = [b["seconds"] / run["seconds"] for b, run in zip(base, own)]
    tokens = [run["tokens_generated"] / b["tokens_generated"] for b, run in zip(base, own)]
    row["speedup"] = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
    row["speedup_per_token"] = median(ratio * more for ratio, more in zip(ratios, tokens))
    row["bound"] = None
    if unpruned:
        # first the larger batches, if any, as measured; then the law on top of them
        share = row["k"] / row["group_size"]
        row["bound"] = median(
            b["seconds"] / u["seconds"] * amdahl(u["phases"], share)
            for b, u in zip(base, unpruned))
    return row


# --- the page ---


def shown(row):
    """A row with all that a page shows of it."""
    found = row | row["phases"]
    found |= zip(PUBLISHED, PAPER.get(row["pruning_rate"], ()))
    for part, size in row.get("memory", {}).items():
        found[f"MB of a step: {part}"] = size / 1e6
    return found


def effects(rows):
    """Sampled accuracy: losses × choices, and the means over each, with their standard errors over
    the seeds."""
    cells = {row["name"]: row["sampled"]["values"] for row in rows}

    def mean(choice, loss):
        losses = LOSSES if loss == "all losses" else [loss]
        choices = CHOICES if choice == "all choices" else [choice]
        own = [cells[", ".join(pair)] for pair in product(losses, choices)]
        values = spread([fmean(of_seed) for of_seed in zip(*own)])
        return f"{values['mean']:.3f} ± {values['std'] / len(own[0]) ** 0.5:.3f}"

    choices, losses = [*CHOICES, "all choices"], [*LOSSES, "all losses"]
    return grid("sampled accuracy ± standard error", choices, losses, mean)


def page(result):
    """The table as Markdown, with all that is needed to make it again."""
    table, rows = TABLES[result["table"]], [shown(row) for row in result["rows"]]
    work = WORK | MEMORY if "memory" in table.measures else WORK
    text = f"""{heading(table.title, result)}{table.plan}
One thread, {result["seeds"]} seeds, mean ± standard deviation; one pass over \
{result["questions"]} questions; accuracy on {result["eval_questions"]} held-out questions, base \
model {rows[0]["base"]["mean"]:.3f} sampled; speed-up over GRPO: median over the seeds.

{pivot(rows, USUAL | table.columns)}

Where the work went:

{pivot(rows, work)}
"""
    if result["table"] == "factorial":
        text += f"\n## Loss and choice\n\n{effects(rows)}\n"
    return text


def picture(result, folder):
    name, rows = result["table"], result["rows"]
    table = TABLES[name]
    table.draw(rows, folder / f"{stem_of(name)}.png", table.panels)
    if name == "1":
        published = [row for row in rows if "mini-batches" not in row["name"]]
        plot.time_to_accuracy(published, folder / "time_to_accuracy.png")


# --- all of it ---


@dataclass
class Config:
    table: str | None = option(
        None, "one of the tables, or all of them; with --quick all", choices=(*TABLES, "all"))
    seeds: int = option(3, "how many runs of every method, at least 3 (factorial: 5)")
    quick: bool = option(
        False, "one seed and 16 questions, into runs/reproduce-quick/: these are no results"
    )
    output: str | None = option(
        None, "folder of the pages; none: runs/results, or runs/reproduce-quick"
    )


def stem_of(name):
    """The name of a table's files."""
    return "table1" if name == "1" else name


def study_of(name, quick, seeds):
    """(the study of a table, what its page says of the runs)"""
    table = TABLES[name]
    about = {"seeds": 1 if quick else max(seeds, table.seeds),
             "questions": 16 if quick else table.questions, "eval_questions": 32 if quick else 512}

    def measure(folder, method, seed):
        options = PROTOCOL | method.options | {
            "seed": seed, "epochs": method.passes * about["questions"] / toy.TRAIN_QUESTIONS,
            "eval_questions": about["eval_questions"], "save_every": 500,
        }
        with mock.patch.dict(ALGORITHMS, OTHER_LOSSES):
            run = one_run(folder, options)
        if "kl" in table.measures:
            run["kl_to_base"] = kl_to_base(folder, toy.BASE)
        return run

    folder = f"runs/{'reproduce-quick' if quick else 'reproduce'}/{name}"
    return Study(folder, table.methods, measure, range(1, about["seeds"] + 1)), about


def reproduce(name, config):
    """Run all methods of one table; write its figures, its page and its picture."""
    table = TABLES[name]
    study, about = study_of(name, config.quick, config.seeds)
    rows = summarize(table.methods, runs_of(study))
    if "memory" in table.measures:
        jobs = {key: PROTOCOL | method.options for key, method in table.methods.items()}
        held = of_steps(jobs, hidden_size=32 if config.quick else 512)
        rows = [row | {"memory": held[row["name"]]} for row in rows]
    result = {"table": name, **about, "protocol": PROTOCOL, "rows": rows}
    output = config.output or ("runs/reproduce-quick" if config.quick else RESULTS)
    publish(output, stem_of(name), result, page, picture)


def main(argv):
    config = parse(Config, argv)
    if not config.table and not config.quick:
        raise UserError(
            f"name a --table: {', '.join(TABLES)}, all. experiments/README.md says what each "
            "answers, and how long it takes.")
    for name in TABLES if config.table in (None, "all") else [config.table]:
        reproduce(name, config)


if __name__ == "__main__":
    run_program(main)
