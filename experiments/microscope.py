"""One update under the microscope: what a step computed for each token, and what it did to it.

    python experiments/microscope.py                          step 13 of nano.py
    python experiments/microscope.py --step 40 --question 3   another step, and its third question
    python experiments/microscope.py runs/NAME                the next step of a run of train.py

The result is step.html in the current folder, for a browser. docs/step.html is that of step 13. The
step is the step that nano.py makes, bit for bit: Python tells the microscope of each call and of
each return (sys.setprofile), so neither nano.py nor grpo.py knows of it.
"""

import itertools
import json
import linecache
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getsourcelines, unwrap
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import grpo
import nano
from engine.base.errors import UserError
from engine.run.command_line import option, parse, run_program
from family.deepseek_v32 import unbiased_kl
from family.gspo import sequence_ratio

PAGE = ROOT / "docs" / "step.html"  # the page of a step; another step gets its own data
DATA = re.compile(r'(<script id="data" type="application/json">).*?(</script>)', re.DOTALL)
MOVED = 0.02  # a token has moved if its log π has changed by more than this
# what is recorded of every loss
LOSS = (grpo.surrogate_loss, grpo._statistics, grpo.clipped_surrogate, grpo.kl_k3, unbiased_kl,
        grpo.importance_ratio, sequence_ratio, grpo.sequence_mean_weights)
# the lines that the page shows: (function, how the line begins, what it computes)
NANO = [
    (nano.step, "advantages =", "advantage"),
    (nano.step, "rows =", "kept"),
    (nano.step, "ref_logp =", "ref"),
    (nano.step, "logp =", "logp"),
    (nano.step, "old_logp = logp", "old"),
    (nano.step, "loss, _ =", "part"),
    (nano.step, "loss.backward()", "gradient"),
    (nano.step, "optimizer.step()", "moved"),
]


@dataclass
class Options:
    step: int = option(13, "the step of nano.py", limits=f"[1, {nano.STEPS}]")
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
            if frame.f_code is grpo.surrogate_loss.__code__:
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
class Pass:
    """A forward and a backward pass over some of the kept completions."""

    update: int  # the number of the update that it belongs to, from 1
    rows: list  # of its N completions among the Q·G of the step
    mask: torch.Tensor  # (N, T) bool
    values: dict  # {name: (N, T)}
    loss: float


@dataclass
class Seen:
    """A step that was recorded. It has Q·G completions of at most T tokens."""

    about: dict  # what the page's head says
    lines: list  # [{code, key}], what the page shows beside the numbers
    questions: list
    tokens: torch.Tensor  # (Q·G, T)
    mask: torch.Tensor  # (Q·G, T) bool
    rewards: torch.Tensor  # (Q·G,)
    right: torch.Tensor  # (Q·G,) bool
    advantages: torch.Tensor  # (Q·G,)
    rows: list  # of the kept completions
    passes: list
    before: torch.Tensor  # (Q·G, T), log π before the step
    after: torch.Tensor
    tokenizer: object

    @property
    def moved(self):
        """(Q·G, T) bool: whether a token has moved."""
        return ((self.after - self.before).abs() > MOVED) & self.mask


def values_of_losses(calls, beta):
    """[{name: (N, T)}] of each call of the loss: what it computed for its tokens."""
    found = []
    ratios = calls[grpo.importance_ratio] or calls[sequence_ratio]
    # DeepSeek's KL is not in surrogate_loss
    own_kls = calls[unbiased_kl] or itertools.repeat(None)
    each = zip(calls[grpo.surrogate_loss], ratios, calls[grpo._statistics], own_kls)
    for loss, ratio, statistics, own_kl in each:
        kl, ref = loss.inside["kl"], loss.given["ref_logp"]
        if own_kl:
            kl, ref = own_kl.value, own_kl.given["ref_logp"]
        shape, weight, surrogate = kl.shape, loss.inside["weights"], loss.inside["surrogate"]
        values = {
            "ref": ref, "old": ratio.given["old_logp"], "logp": loss.given["logp"],
            "ratio": ratio.value.view(len(kl), -1).expand(shape),
            "surrogate": surrogate, "clipped": statistics.inside["clipped"], "kl": kl,
            "weight": weight, "part": -weight * (surrogate - beta * kl),
            "gradient": loss.given["logp"].grad,
        }
        found.append({name: x.detach() for name, x in values.items() if x is not None})
    return found


def weights_before_and_after(model, score, function, *arguments):
    """Call function(*arguments), which trains the model. Returns (its value, score() with the
    weights before, score() with the weights after)."""
    learning = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in learning]
    value = function(*arguments)
    after = [p.detach().clone() for p in learning]
    scored = []
    with torch.no_grad():
        for weights in (before, after):
            for p, weight in zip(learning, weights):
                p.copy_(weight)
            scored.append(score(value))
    return value, *scored


# --- nano.py ---


class Enough(Exception):
    """The step has been recorded."""


def step_of_nano(number):
    """Run nano.py up to step `number`. Returns this step as Seen."""
    made, step, found = itertools.count(1), nano.step, []

    def instead(*arguments):
        if next(made) < number:
            return step(*arguments)
        found.append(see_nano(step, number, *arguments))
        raise Enough

    nano.step = instead
    try:
        nano.main([])
    except Enough:
        return found[0]
    finally:
        nano.step = step


def see_nano(step, number, model, reference, optimizer, tokenizer, task, reward, questions):
    """Make a step of nano.py. Returns it as Seen."""
    def record():
        with watching(step, *LOSS) as calls:
            step(model, reference, optimizer, tokenizer, task, reward, questions)
        return calls

    def score(calls):
        inside = calls[step][0].inside
        asked, completions = inside["asked"], inside["completions"]
        tokens = torch.cat([asked, completions], dim=1)
        mask = torch.cat([inside["asked_mask"], inside["mask"]], dim=1)
        return nano.logprobs(model, tokens, mask, completions.shape[1])

    calls, before, after = weights_before_and_after(model, score, record)
    inside = calls[step][0].inside
    if not inside["A"].any():
        raise UserError(f"step {number} of nano.py has nothing to learn from: in each question all "
                        "completions have the same reward. Name another --step.")
    rows, rewards, passes = inside["rows"].tolist(), inside["scores"].flatten(), []
    for update, values in enumerate(values_of_losses(calls, nano.BETA), 1):
        loss = calls[grpo.surrogate_loss][update - 1].value[0].item()
        passes.append(Pass(update, rows, inside["m"], values, loss))
    lines = lines_of(NANO, lines_of_loss(calls, grpo.sequence_mean_weights))
    about = {"command": "python nano.py", "step": number, "beta": nano.BETA, "clip": True,
             "weight": "1 / (N |o_i|)"}
    return Seen(about, lines, questions, inside["completions"], inside["mask"], rewards,
                rewards > 0, inside["advantages"].flatten(), rows, passes, before, after, tokenizer)


# --- lines of code ---


def lines_of(table, of_loss):
    """[{code, key}] of the lines of a table, each after its comment, if that has a number.

    of_loss: [{code, key}], the lines below the call of the loss.
    """
    shown = []
    for function, begin, key in table:
        source = [line.strip() for line in getsourcelines(function)[0]]
        [at, *_] = [i for i, line in enumerate(source) if line.startswith(begin)]
        comments = [line for line in source[:at] if re.match(r"# \d", line)]
        if comments and {"code": comments[-1], "key": None} not in shown:
            shown.append({"code": comments[-1], "key": None})
        shown.append({"code": whole(source[at]), "key": key})
        if key == "part":
            shown += of_loss
    return shown


def lines_of_loss(calls, weights):
    """[{code, key}] of the lines that the loss has run. weights: the function that made them."""
    ratio = grpo.importance_ratio if calls[grpo.importance_ratio] else sequence_ratio
    functions = {"ratio": ratio, "surrogate": grpo.clipped_surrogate, "kl": grpo.kl_k3,
                 "weight": weights}
    return [{"code": "  " + whole(calls[function][0].line), "key": key}
            for key, function in functions.items() if calls[function]]


def whole(line):
    """A line of code. If it goes on in the next line, it ends with "…)"."""
    return line + "…)" if line.endswith("(") else line


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


def numbers(row, mask):
    """The numbers of a row for the page, with seven digits. Outside of the mask: None."""
    return [float(f"{x:.7g}") if inside else None for x, inside in zip(row.tolist(), mask.tolist())]


def completion_of(seen, row):
    """What the page shows of a completion."""
    mask = seen.mask[row]
    length = int(mask.nonzero().max()) + 1 if mask.any() else 0
    mask, passes = mask[:length], []
    for one in seen.passes:
        if row in one.rows:
            i = one.rows.index(row)
            values = {name: numbers(x[i], one.mask[i]) for name, x in one.values.items()}
            passes.append({"update": one.update} | values)
    return {
        "tokens": texts_of(seen.tokenizer, seen.tokens[row, :length].tolist()),
        "reward": seen.rewards[row].item(), "right": bool(seen.right[row]),
        "advantage": float(f"{seen.advantages[row].item():.7g}"), "kept": row in seen.rows,
        "before": numbers(seen.before[row], mask), "after": numbers(seen.after[row], mask),
        "passes": passes,
    }


def page_data(seen, number=None):
    """What the page of a step shows of one question. number: of the question, from 1. None: of that
    of the kept completion in which the most tokens moved."""
    Q = len(seen.questions)
    G = len(seen.tokens) // Q
    moved = seen.moved.sum(1)
    first = max(seen.rows, key=lambda row: int(moved[row]))
    number = number or first // G + 1
    if number > Q:
        raise UserError(f"--question must lie in 1 … {Q}, not {number}: the step has {Q} "
                        "questions.")
    found = {}
    for row in range((number - 1) * G, number * G):
        own = completion_of(seen, row)
        updates = [one["update"] for one in own["passes"]]
        same = json.dumps([own["tokens"], own["reward"], own["kept"], updates])
        found.setdefault(same, own | {"count": 0})["count"] += 1
    updates = {}
    for one in seen.passes:
        own = updates.setdefault(one.update, {"loss": 0.0, "completions": 0, "tokens": 0})
        own["loss"] += one.loss
        own["completions"] += len(one.rows)
        own["tokens"] += int(one.mask.sum())
    question = seen.questions[number - 1]
    return seen.about | {
        "number": number, "questions": Q, "group": G, "trained": len(seen.rows),
        "tokens": int(seen.mask.sum()), "moved": int(moved.sum()), "least": MOVED,
        "updates": list(updates.values()), "lines": seen.lines,
        "question": question["question"], "answer": question["answer"],
        "completions": sorted(found.values(), key=lambda one: (not one["kept"], -one["count"])),
    }


def page_of(data):
    """docs/step.html with other data, as text."""
    # a completion is no markup: "</script>" must not end the data
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return DATA.sub(lambda found: found[1] + text + found[2], PAGE.read_text(encoding="utf-8"))


def main(argv):
    options = parse(Options, argv)
    seen = step_of_nano(options.step)
    data = page_data(seen, options.question)
    page = page_of(data)
    Path("step.html").write_text(page, encoding="utf-8")
    print(f"step.html: question {data['number']} of step {data['step']}. Of the step's "
          f"{data['tokens']} tokens {data['moved']} moved by more than {MOVED}.")


if __name__ == "__main__":
    run_program(main)
