"""One update under the microscope: what a step computed for each token, and what it did to it.

    python experiments/microscope.py                          step 13 of nano.py
    python experiments/microscope.py --step 40 --question 3   another step, and its third question

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
import re
import sys
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import nano
from engine.base.errors import UserError
from engine.base.program import run_program
from engine.options.command_line import option, parse

# the page of a step; for another step only its data change
PAGE = Path(__file__).parents[1] / "docs/step.html"
DATA = re.compile(r'(<script id="data" type="application/json">).*?(</script>)', re.DOTALL)
MOVED = 0.02  # a token has moved if its log π has changed by more than this
# what is recorded of every loss
LOSS = (nano.cppo_loss,)


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
            if frame.f_code is nano.cppo_loss.__code__:
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
    questions: list
    tokens: torch.Tensor  # (Q·G, T)
    mask: torch.Tensor  # (Q·G, T) bool
    rewards: torch.Tensor  # (Q·G,)
    right: torch.Tensor  # (Q·G,) bool
    advantages: torch.Tensor  # (Q·G,)
    norms: list  # of each completion ‖∇_θ 1/|o| Σ_t log π‖ before the step
    rows: list  # of the kept completions
    updates: list
    before: torch.Tensor  # (Q·G, T), log π before the step; NaN outside of the mask
    after: torch.Tensor
    model: torch.nn.Module  # with the weights after the step
    tokenizer: object


def values_of_losses(calls, beta):
    """{name: (N, T)} of one call of the loss after the other: what it computed for its tokens."""
    for loss in calls[nano.cppo_loss]:
        given, inside = loss.given, loss.inside
        logp, kl, A = given["logp"], inside["k3"], given["A"]
        weight, ratio, surrogate = inside["weights"], inside["ratio"], inside["surrogate"]
        yield {
            "ref": given["ref_logp"], "old": given["old_logp"], "logp": logp, "ratio": ratio,
            "surrogate": surrogate, "clipped": surrogate < ratio * A, "kl": kl, "weight": weight,
            "part": -weight * (surrogate - beta * kl), "gradient": logp.grad,
        }


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


def scored_by_its_weights(model, score, function, optimizer):
    """Call function(), which trains the model. Returns (its value, [score(value) with the weights
    before, …, with the weights after]): between these two after each step of the optimizer."""
    learning = [p for p in model.parameters() if p.requires_grad]
    found, scored = [], []

    def keep(*_):
        found.append([p.detach().clone() for p in learning])

    keep()
    hook = optimizer.register_step_post_hook(keep)
    value = function()
    hook.remove()
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

    before = deepcopy(model)
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
    norms = lengths_of_gradients(before, tokens, seen, mask)
    tokens, mask = tokens.cpu(), mask.cpu()
    about = {"command": "python nano.py", "step": number, "rewards": inside["scores"].tolist(),
             "lengths": mask.sum(1).view(-1, nano.G).tolist(), "rows": task["rows"],
             "settings": {"G": nano.G, "P": nano.P, "epsilon": nano.EPS_LOW, "beta": nano.BETA}}
    return Seen(about, questions, tokens[:, -mask.shape[1] :], mask, rewards, rewards > 0,
                inside["advantages"].flatten().cpu(), norms, rows.tolist(), updates, scored[0],
                scored[-1], model, tokenizer)


def lengths_of_gradients(model, tokens, seen, mask):
    """‖∇_θ 1/|o| Σ_t log π(o_t)‖ of each completion."""
    weights, norms = [p for p in model.parameters() if p.requires_grad], []
    for row in range(len(mask)):
        logp = nano.logprobs(model, tokens[[row]], seen[[row]], mask.shape[1])
        gradient = torch.autograd.grad(logp[mask[[row]]].mean(), weights)
        norms.append(torch.cat([g.flatten() for g in gradient]).norm().item())
    return norms


def fill_in_the_pruned(updates, ref, scored):
    """Give each completion the three numbers that the step computes for the kept ones alone, so
    that the page can keep others. scored: log π with the weights of each update."""
    for one, logp in zip(updates, scored):
        for name, x in {"ref": ref, "old": scored[0], "logp": logp}.items():
            one.values[name] = torch.where(one.values[name].isnan(), x, one.values[name])


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
        "norm": short(seen.norms[row]),
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
    return seen.about | {
        "number": number, "questions": Q, "group": G, "trained": len(seen.rows),
        "tokens": int(pushed.sum()), "moved": sum(moved), "least": MOVED,
        "updates": [{"loss": one.values["part"].nansum().item()} for one in seen.updates],
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
    options = parse(Options, argv)
    if not os.access(".", os.W_OK):  # not after minutes
        raise UserError("step.html cannot be written into this folder: start in another one.")
    seen = step_of_nano(options.step or 13)
    data = page_data(seen, options.question)
    Path("step.html").write_text(page_of(data), encoding="utf-8")
    print("step.html: question {number} of step {step}. The step pushed {tokens} tokens, and "
          "{moved} of them moved by more than {least}.".format(**data))


if __name__ == "__main__":
    run_program(main)
