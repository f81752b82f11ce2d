"""One update under the microscope: what a step computed for each token, and what it did to it.

    python experiments/microscope.py                          step 13 of nano.py
    python experiments/microscope.py --step 40 --question 3   another step, and its third question
    python experiments/microscope.py runs/NAME                the next step of a run of train.py

The result is step.html in the current folder, for a browser. docs/step.html is that of step 13, and
docs/step/build.py makes the page around its numbers. The step is the step that nano.py makes, bit
for bit: Python tells the microscope of each call and of each return (sys.setprofile), so neither
nano.py nor grpo.py knows of it.
"""

import itertools
import json
import linecache
import math
import os
import random
import re
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getsourcelines, unwrap
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import batches
import grpo
import nano
import train
import update
from engine.base import ranks
from engine.base.errors import UserError, one_line
from engine.data.questions import rows_of_run
from engine.model.folders import checkpoints
from engine.run import checkpoint
from engine.run.begin import begin
from engine.run.command_line import option, parse, run_program
from engine.run.config import open_run
from family.deepseek_v32 import unbiased_kl
from family.gspo import sequence_ratio
from records import Batch, Moment

# the page of a step; for another step only its data change
PAGE = Path(__file__).parents[1] / "docs/step.html"
DATA = re.compile(r'(<script id="data" type="application/json">).*?(</script>)', re.DOTALL)
MOVED = 0.02  # a token has moved if its log π has changed by more than this
# what is recorded of every loss
LOSS = (nano.cppo_loss, grpo.surrogate_loss, grpo.clipped_surrogate, grpo.kl_k3, unbiased_kl,
        grpo.importance_ratio, sequence_ratio)
# the lines of a run that the page shows, by their function: {how the line begins: its row of the
# page}. Those of nano.py are in docs/step/book.md
TRAIN = {
    train.train_step: {
        "advantages =": "advantage",
        "rows, advantages =": "kept",
        "batch.ref_logp =": "ref",
    },
    update.learn_policy: {
        "logp, entropy =": "logp",
        "old_logp =": "old",
        "loss, stats =": "part",
        "loss.backward()": "gradient",
    },
    update.update: {"networks.step()": "moved"},
}
# rows whose line is the one that called a function
CALLED = {sequence_ratio: "ratio", grpo.importance_ratio: "ratio",
          grpo.clipped_surrogate: "surrogate", grpo.kl_k3: "kl"}


@dataclass
class Options:
    step: int | None = option(None, "the step of nano.py; else 13", limits=f"[1, {nano.STEPS}]")
    question: int | None = option(
        None, "the question of the step, from 1; if none is given, that of the kept completion in "
        "which the most tokens moved", limits="[1, ∞)")


# --- recording ---


@contextmanager
def watching(*functions):
    """{function: its calls} while the block runs. Of each call: `given`, its arguments; `inside`,
    its variables at the end; `value`, what it returned; `line`, the line that called it."""
    calls = {function: [] for function in functions}
    own = {unwrap(function).__code__: calls[function] for function in functions}

    def watch(frame, event, value):
        if frame.f_code not in own or event not in ("call", "return"):
            return
        if event == "call":
            caller = frame.f_back
            line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
            given = dict(frame.f_locals)
            if frame.f_code in (nano.cppo_loss.__code__, grpo.surrogate_loss.__code__):
                given["logp"].retain_grad()  # autograd keeps ∂loss/∂log π, which it computes anyway
            own[frame.f_code].append(SimpleNamespace(given=given, line=line, caller=caller))
        else:
            call = own[frame.f_code][-1]
            call.inside, call.value = dict(frame.f_locals), value
            call.of_caller, call.caller = dict(call.caller.f_locals), None

    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@dataclass
class Update:
    """What an update computed for the tokens of some of the Q·G completions."""

    rows: list  # of these completions
    values: dict  # {name: (Q·G, T)}; NaN where there is no token to train on


@dataclass
class Seen:
    """A step that was recorded. It has Q·G completions of at most T tokens."""

    about: dict  # what the page's head says
    lines: dict  # {row of the page: the line of a run}; of nano.py the page has its own
    questions: list
    tokens: torch.Tensor  # (Q·G, T)
    mask: torch.Tensor  # (Q·G, T) bool
    rewards: torch.Tensor  # (Q·G,)
    right: torch.Tensor  # (Q·G,) bool
    advantages: torch.Tensor  # (Q·G,)
    rows: list  # of the kept completions
    updates: list
    before: torch.Tensor  # (Q·G, T), log π before the step; NaN outside of the mask
    after: torch.Tensor
    model: torch.nn.Module  # with the weights after the step
    tokenizer: object


def values_of_losses(calls, beta):
    """{name: (N, T)} of one call of the loss after the other: what it computed for its tokens."""
    losses = calls[nano.cppo_loss] or calls[grpo.surrogate_loss]
    # what π_old was given to
    olds = calls[grpo.importance_ratio] or calls[sequence_ratio] or losses
    # DeepSeek's KL is not in surrogate_loss
    own_kls = calls[unbiased_kl] or itertools.repeat(None)
    for loss, old, own_kl in zip(losses, olds, own_kls):
        given, inside = loss.given, loss.inside
        if "k3" in inside:  # nano.cppo_loss has its own names
            inside |= {"kl": inside["k3"], "advantages": inside["A"][:, None]}
        logp, ref, kl = given["logp"], given["ref_logp"], inside["kl"]
        weight, ratio, surrogate = inside["weights"], inside["ratio"], inside["surrogate"]
        if own_kl:
            kl, ref = own_kl.value, own_kl.given["ref_logp"]
        values = {
            "old": old.given["old_logp"], "logp": logp, "ratio": ratio,
            "surrogate": surrogate, "clipped": surrogate < ratio * inside["advantages"], "kl": kl,
            "weight": weight, "part": -weight * (surrogate - beta * kl), "gradient": logp.grad,
        }
        if ref is not None:
            values = {"ref": ref} | values
        yield values


def updates_of(calls, beta, cuts, shape):
    """The Updates of a step. cuts: of each, [(rows, mask)] of its micro-batches. shape: (Q·G, T)"""
    updates, each = [], values_of_losses(calls, beta)
    for cut in cuts:
        own = Update([], {})
        for rows, mask in cut:
            own.rows += rows.tolist()
            for name, x in next(each).items():
                everywhere = own.values.setdefault(name, torch.full(shape, torch.nan))
                x = x.detach().float().masked_fill(~mask, torch.nan).cpu()
                everywhere[rows.cpu(), : x.shape[1]] = x
        updates.append(own)
    return updates


def scored_by_its_weights(model, score, function, optimizer=None):
    """Call function(), which trains the model. Returns (its value, [score(value) with the weights
    before, …, with the weights after]): between these two after each step of the optimizer, if it
    is given."""
    learning = [p for p in model.parameters() if p.requires_grad]
    found, scored = [], []

    def keep(*_):
        found.append([p.detach().clone() for p in learning])

    keep()
    hook = optimizer and optimizer.register_step_post_hook(keep)
    value = function()
    hook.remove() if hook else keep()
    with torch.no_grad():
        for weights in found:
            for p, weight in zip(learning, weights):
                p.copy_(weight)
            scored.append(score(value))
    return value, scored


# --- nano.py ---


class Enough(Exception):
    """The step has been recorded."""


def step_of_nano(number):
    """Run nano.py up to step `number`. Returns this step as Seen."""
    made, step = itertools.count(1), nano.step

    def instead(*arguments):
        if next(made) < number:
            return step(*arguments)
        raise Enough(see_nano(step, number, *arguments))

    nano.step = instead
    try:
        nano.main([])
    except Enough as enough:
        return enough.args[0]
    finally:
        nano.step = step


def see_nano(step, number, model, reference, optimizer, tokenizer, task, questions):
    """Make a step of nano.py. Returns it as Seen."""
    def record():
        with watching(step, nano.sample, *LOSS) as calls:
            step(model, reference, optimizer, tokenizer, task, questions)
        return calls

    def score(calls):
        tokens, seen, mask = calls[nano.sample][0].value
        logp = nano.logprobs(model, tokens, seen, mask.shape[1])
        return logp.masked_fill(~mask, torch.nan).cpu()

    calls, scored = scored_by_its_weights(model, score, record, optimizer)
    inside = calls[step][0].inside
    if not inside["nonzero"]:
        raise UserError(f"step {number} of nano.py has nothing to learn from: in each question all "
                        "completions have the same reward. Name another --step.")
    rows, rewards = inside["rows"], inside["scores"].flatten().cpu()
    cut = [(rows[i], inside["m"][i]) for i in inside["micro_batches"]]
    updates = updates_of(calls, nano.BETA, [cut] * nano.MU, scored[0].shape)
    tokens, seen, mask = calls[nano.sample][0].value
    with torch.no_grad():
        ref = nano.logprobs(reference, tokens, seen, mask.shape[1]).cpu().masked_fill(
            ~mask.cpu(), torch.nan)
    fill_in_the_pruned(updates, ref, scored)
    tokens, mask = tokens.cpu(), mask.cpu()
    about = {"command": "python nano.py", "step": number, "beta": nano.BETA, "clip": True,
             "weight": "1 / (N |o_i|)", "rewards": inside["scores"].tolist(),
             "lengths": mask.sum(1).view(-1, nano.G).tolist(), "rows": nano.ROWS,
             "settings": {"G": nano.G, "P": nano.P, "epsilon": nano.EPS, "beta": nano.BETA}}
    return Seen(about, {}, questions, tokens[:, -mask.shape[1] :], mask, rewards, rewards > 0,
                inside["advantages"].flatten().cpu(), rows.tolist(), updates, scored[0], scored[-1],
                model, tokenizer)


def fill_in_the_pruned(updates, ref, scored):
    """Give each completion the three numbers that the step computes for the kept ones alone, so
    that the page can keep others. scored: log π with the weights of each update."""
    for one, logp in zip(updates, scored):
        for name, x in {"ref": ref, "old": scored[0], "logp": logp}.items():
            one.values[name] = torch.where(one.values[name].isnan(), x, one.values[name])


# --- a run of train.py ---


def step_of_run(run_dir):
    """Make the next step of a run of train.py, in memory. Returns it as Seen. The run's folder does
    not change."""
    with tempfile.TemporaryDirectory() as folder:
        link_newest(run_dir, folder)
        # one device makes the step of several: a step asks as many questions as it did
        words = ["--output_dir", folder, "--resume", "--shard", "none"]
        try:
            return see_train(run_dir, *open_run(words)[:2])
        except UserError as error:
            raise UserError(str(error).replace(folder, run_dir)) from None
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{run_dir} cannot be read ({one_line(error)}).") from error


def link_newest(run_dir, folder):
    """Put links to the options and the newest checkpoint of a run into a folder. There the engine
    may resume the run, as it likes to rename what is damaged."""
    if not Path(run_dir, "run.json").is_file():
        raise UserError(f"{run_dir} holds no run of train.py: name the folder of a run, such as "
                        "runs/toy-cppo-1, or none for a step of nano.py.")
    found = checkpoints(run_dir)
    if checkpoint.has_finished(run_dir):
        found = found[:-1]  # there is no step after the last one
    newest = next((path for path in reversed(found) if not checkpoint.is_damaged(path)), None)
    if newest is None:
        raise UserError(f"{run_dir} holds no whole checkpoint before its last step: start it again "
                        "with a smaller --save_every.")
    for path in (newest, Path(run_dir, "run.json")):
        Path(folder, path.name).symlink_to(path.resolve())


def see_train(run_dir, config, algorithm):
    """Make the next step of a run, as train.train does. Returns it as Seen."""
    if algorithm.critic:
        raise UserError(f"{run_dir} trains with PPO, in which each token has an advantage of its "
                        "own: the microscope shows algorithms with one for each completion.")
    device, sampling = ranks.start(), config.sampling
    rows = rows_of_run(config.data)
    run, _ = begin(config, algorithm, device, rows)
    algorithm, networks = run.algorithm, run.networks
    if run.finished:
        raise UserError(f"{run_dir} has made all its steps: there is no next one.")
    run.follow_schedule()
    networks.follow(run.learning_rate)
    number, limits = run.state.step + 1, update.Limits(run.micro_batch_tokens)
    rng = random.Random(f"{run.seed} {number} 0")
    moment = Moment(number, run.progress, run.mean_rewards)

    def record():
        functions = update.accumulate, batches.with_token_weights, algorithm.token_weights, *LOSS
        with watching(*functions) as calls:
            step = train.train_step(networks, algorithm, run.reward_functions, sampling, limits,
                                    run.next_questions(), rng, moment, run.next_questions)
        return calls, step

    def score(recorded):
        rollout = recorded[1].rollout
        prompts = [q["prompt"] for q in rollout.questions for _ in range(algorithm.group_size)]
        batch = Batch(
            prompts, rollout.tokens, rollout.mask, rollout.total.flatten().to(device))
        logp = update.compute_minibatch(networks.policy.logprobs, batch, networks.policy, limits)
        return logp.cpu().masked_fill(~rollout.mask, torch.nan)

    (calls, step), [before, after] = scored_by_its_weights(networks.model, score, record)
    if not calls[update.accumulate]:
        raise UserError(f"step {number} of {run_dir} has nothing to learn from: in each question "
                        "all completions have the same reward. Let the run make more steps.")
    if not calls[grpo.surrogate_loss]:
        raise UserError(f"the loss of {algorithm.name} does not call grpo.surrogate_loss, so "
                        "its parts cannot be seen: let it call surrogate_loss.")
    about, lines = about_train(algorithm, calls), lines_of_run(algorithm, calls)
    about |= {"command": run_dir, "step": number, "longest": sampling.max_new_tokens}
    rollout = step.rollout
    return Seen(about, lines, rollout.questions, rollout.tokens.cpu(), rollout.mask,
                rollout.total.flatten(), rollout.rewards[0].flatten() > 0,
                step.advantages.flatten(), step.rows.tolist(),
                updates_of(calls, algorithm.beta, cuts_of_train(calls), before.shape), before,
                after, networks.model, networks.tokenizer)


def cuts_of_train(calls):
    """[(rows, mask)] of the micro-batches of each update."""
    rows_of = {id(call.value): call.of_caller["rows_here"]
               for call in calls[batches.with_token_weights]}
    for call in calls[update.accumulate]:
        minibatch = call.given["minibatch"]
        rows_here = rows_of[id(minibatch)]
        yield [(rows_here[rows], minibatch.rows(rows).mask)
               for rows, _ in minibatch.cut.micro_batches]


def about_train(algorithm, calls):
    """What the page's head says of an algorithm."""
    # its formula is beside its name in algorithms.py
    formula = re.search(r"# (.+)|$", getsourcelines(algorithm.token_weights)[0][0])[1] or ""
    # the factors of family/nat.py and family/tis.py
    formula += " · 1/p_t" * (algorithm.shortest_prefix is not None)
    formula += " · w_t" * bool(algorithm.importance_weights)
    clips = calls[grpo.surrogate_loss][0].given["surrogate"] is None
    return {"beta": algorithm.beta, "clip": clips, "weight": formula}


def lines_of_run(algorithm, calls):
    """{row of the page: line of code} of train.py and of the loss."""
    lines = {"weight": calls[algorithm.token_weights][0].line}
    for function, key in CALLED.items():
        if calls[function]:
            lines[key] = calls[function][0].line
    for function, keys in TRAIN.items():
        source = [line.strip() for line in getsourcelines(function)[0]]
        for start, key in keys.items():
            [lines[key], *_] = [line for line in source if line.startswith(start)]
    without = () if algorithm.beta else ("ref", "kl")
    # a line that goes on in the next line ends with "…)"
    return {key: line + "…)" * line.endswith("(") for key, line in lines.items()
            if key not in without}


# --- the page ---


def texts_of(tokenizer, ids):
    """The text of each token. If several tokens make one character, the last one has it."""
    texts, start, shown = [], 0, ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and end - start < 5:
            texts.append("")
            continue
        texts.append(text[len(shown) :])
        start = end - 1
        shown = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
    return texts


def short(x):
    """A number for the page, with seven digits."""
    return float(f"{x:.7g}")


def numbers(row):
    """The numbers of a row for the page; None for NaN."""
    return [None if math.isnan(x) else short(x) for x in row.tolist()]


def completion_of(seen, row):
    """What the page shows of a completion."""
    trained_on = seen.mask[row].nonzero()
    length = int(trained_on.max()) + 1 if len(trained_on) else 0
    passes = []
    for number, one in enumerate(seen.updates, 1):
        values = {name: numbers(x[row, :length]) for name, x in one.values.items()
                  if not x[row].isnan().all()}
        if values:
            passes.append({"update": number} | values)
    return {
        "tokens": texts_of(seen.tokenizer, seen.tokens[row, :length].tolist()),
        "reward": seen.rewards[row].item(), "right": bool(seen.right[row]),
        "advantage": short(seen.advantages[row].item()), "kept": row in seen.rows,
        "before": numbers(seen.before[row, :length]),
        "after": numbers(seen.after[row, :length]),
        "passes": passes,
    }


def page_data(seen, number=None):
    """What the page of a step shows of one question. number: of the question, from 1. None: of that
    of the kept completion in which the most tokens moved. tokens: how many have a gradient. moved:
    how many of these moved."""
    Q = len(seen.questions)
    G = len(seen.tokens) // Q
    pushed = sum(one.values["gradient"].nan_to_num().abs() for one in seen.updates) > 0
    moved = (pushed & ((seen.after - seen.before).abs() > MOVED)).sum(1).tolist()
    number = number or moved.index(max(moved)) // G + 1
    if number > Q:
        raise UserError(f"--question must lie in 1 … {Q}, not {number}: the step has {Q} "
                        "questions.")
    question = seen.questions[number - 1]
    updates = []
    for one in seen.updates:
        # Σ|o_i| counts all that the policy wrote, also after a random prefix
        updates.append({"loss": one.values["part"].nansum().item(), "completions": len(one.rows),
                        "tokens": int(seen.mask[one.rows].sum())})
    return seen.about | {
        "number": number, "questions": Q, "group": G, "trained": len(seen.rows),
        "tokens": int(pushed.sum()), "moved": sum(moved), "least": MOVED,
        "updates": updates, "lines": seen.lines,
        "question": question["question"], "answer": question["answer"],
        "completions": different(seen, range((number - 1) * G, number * G)),
    }


def different(seen, rows):
    """What the page shows of these completions, each once and with its places in the group: the
    kept ones first, then the frequent ones."""
    found = {}
    for row in rows:
        own = completion_of(seen, row)
        weights = [[one["update"], one.get("weight")] for one in own["passes"]]
        same = json.dumps([own["tokens"], own["reward"], own["advantage"], own["kept"], weights])
        found.setdefault(same, own | {"members": []})["members"].append(row - rows.start)
    return sorted(found.values(), key=lambda one: (not one["kept"], -len(one["members"])))


def page_of(data):
    """docs/step.html with other data, as text."""
    # a completion is no markup: "</script>" must not end the data
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return DATA.sub(lambda found: found[1] + text + found[2], PAGE.read_text(encoding="utf-8"))


def main(argv):
    run_dir = argv[0] if argv and not argv[0].startswith("-") else None
    options = parse(Options, argv[1:] if run_dir else argv)
    if run_dir and options.step:
        raise UserError("--step is for nano.py: of a run the microscope shows the next step.")
    if not os.access(".", os.W_OK):  # not after minutes
        raise UserError("step.html cannot be written into this folder: start in another one.")
    seen = step_of_run(run_dir) if run_dir else step_of_nano(options.step or 13)
    data = page_data(seen, options.question)
    Path("step.html").write_text(page_of(data), encoding="utf-8")
    print("step.html: question {number} of step {step}. The step pushed {tokens} tokens, and "
          "{moved} of them moved by more than {least}.".format(**data))


if __name__ == "__main__":
    run_program(main)
