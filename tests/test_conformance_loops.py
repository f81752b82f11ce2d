"""conformance/loops.py: a whole step is run, and what is wrong with it is read from the weights."""

import types
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BatchEncoding

import nano
from conformance import compare, loops
from conformance.loops import END, PADDING

BETA = 0.04
digits = lambda tokens: "".join(str(int(token)) for token in tokens)


class Digits:
    """A tokenizer: a text is the digits of its tokens."""

    pad_token_id, eos_token_id = PADDING, END

    def apply_chat_template(self, chats, **options):
        texts = [chat[-1]["content"] for chat in chats]
        longest = max(map(len, texts))
        ids = torch.tensor([[*map(int, text.rjust(longest, "0"))] for text in texts])
        return BatchEncoding({"input_ids": ids, "attention_mask": (ids != PADDING).long()})

    def decode(self, tokens, **options):
        return digits(tokens)


class Language(torch.nn.Module):
    """The table as a causal language model of transformers, as far as nano.py uses it."""

    device = torch.device("cpu")

    def __init__(self, policy, sampler):
        super().__init__()
        self.policy, self.sampler = policy, sampler

    def generate(self, input_ids, temperature, **options):
        return self.sampler.extend(input_ids, temperature)

    def forward(self, tokens, **options):
        return SimpleNamespace(logits=self.policy(tokens))


def of_nano(policy, questions, sampler, reward, *, module=None, P=0.5):
    """nano.step on the probe."""
    module = module or planted()
    module.G, module.P, module.ROWS, module.HEAT = sampler.group_size, P, 4, sampler.temperature
    module.reward = lambda text, answer: reward(answer, text)
    model = Language(policy, sampler)
    reference = deepcopy(model).requires_grad_(False)
    task = {"system_prompt": "", "longest": sampler.longest}
    asked = [{"question": digits(prompt), "answer": digits(prompt)} for prompt in questions]
    module.step(model, reference, policy.optimizer, Digits(), task, asked)


def changed(text, changes):
    """A text with other lines: each change is (the old words, the new ones)."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def planted(*changes):
    """nano.py with other lines: a module."""
    module = types.ModuleType("planted")
    module.__file__ = nano.__file__
    exec(changed(Path(nano.__file__).read_text(), changes), vars(module))
    return module


ASKED = "asked = [question for question in questions for _ in range(G)]"
WEIGHTS = "w = sequence_mean_weights(m, kept)"
IS_TOKEN = "is_eos.cumsum(1) - is_eos.long() == 0"
ROWS = "✗ rows of a group are not one question: "
FAULTS = {  # what is said of nano.py with these changes
    "✗ sampled at one temperature, scored at 1 [5]": [
        ("temperature=1.0", "temperature=0.7")],
    "✗ the last token, the EOS, is not trained on [4]": [(IS_TOKEN, "is_eos.cumsum(1) == 0")],
    "✗ the last token, the EOS, is not trained on, but |o| counts it [4]": [
        (WEIGHTS, "w = torch.cat([m[:, 1:], m[:, :1] & False], 1) "
                  "/ m.sum(1, keepdim=True) / kept")],
    "✗ padding is trained on": [(IS_TOKEN, "is_eos.cumsum(1) >= 0")],
    "✗ the tokens of the prompt are trained on": [
        ("    if nonzero:", "    m, T = seen[:, 1:].bool(), tokens.shape[1] - 1\n"
                            "    if nonzero:")],
    "✗ a mean of means over micro-batches [3]": [
        ("w[i])", "sequence_mean_weights(m[i], len(i)) / len(micro_batches))")],
    "✗ the means of micro-batches are added up [3]": [
        ("w[i])", "sequence_mean_weights(m[i], len(i)))")],
    "✗ divided by the padded length, not by |o| [3]": [(WEIGHTS, "w = m / (kept * T)")],
    f"{ROWS}G consecutive rows are compared": [
        (ASKED, "asked = questions * G")],
    f"{ROWS}G = 4 completions of each are": [
        (ASKED, "asked = [questions[q if i == 0 else 0] for q in range(3) for i in range(G)]")],
    f"{ROWS}a completion was scored with another": [
        ("sample(model, tokenizer, task, asked)", "sample(model, tokenizer, task, questions * G)")],
    "✗ the advantages are taken after pruning": [
        ("advantages.flatten()[rows]",
         "group_advantages(scores.flatten()[rows].view(len(questions), -1)).flatten()")],
    "✗ the old log-probabilities are those of the updated policy": [
        ("old_logp.setdefault(i, logp.detach())", "logp.detach()")],
    "≈ an update with nothing to learn": [("if nonzero:", "if True:")],
    "≈ the updates are 2, 2 times as large as with the learning rate 0.5": [
        ("-(weights", "-2 * (weights")],
}


def said(step, beta=BETA):
    sign, sentence, *_ = loops.verdict(step, beta)
    return f"{sign} {sentence}"


@pytest.mark.parametrize("words", FAULTS)
def test_a_mistake_that_is_planted_in_nano_is_found(words):
    module = planted(*FAULTS[words])
    assert said(partial(of_nano, module=module)).startswith(words)


# --- a step as many people write it ---


PLAIN = """
def step(policy, questions, sampler, reward):
    T, rate = sampler.temperature, 1.0
    rows = [prompt for prompt in questions for _ in range(sampler.group_size)]
    completions = sampler(rows, T)
    r = torch.tensor([reward(*row) for row in zip(rows, completions)]).view(-1, 4)
    A = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)
    A = A.flatten()
    if not A.any():
        return
    kept = range(len(A))
    rows, completions, A = [rows[i] for i in kept], [completions[i] for i in kept], A[kept]
    first = None
    for update in range(2):
        tokens = [torch.tensor(prompt + text) for prompt, text in zip(rows, completions)]
        logits = pad([*policy(pad(tokens)) / T])[:, :-1]
        log_pi, tokens = logits.log_softmax(-1), pad(tokens)[:, 1:]
        logp = log_pi.gather(-1, tokens[..., None])[..., 0]
        place = torch.arange(1, tokens.shape[1] + 1)
        start = torch.tensor([[len(prompt)] for prompt in rows])
        end = start + torch.tensor([[len(text)] for text in completions])
        mask = (place >= start) & (place < end)
        first = logp.detach() if first is None else first
        old = first
        ratio = (logp - old).exp()
        surrogate = torch.min(ratio * A[:, None], ratio.clamp(0.8, 1.2) * A[:, None])
        kl = (first - logp).exp() - (first - logp) - 1
        objective = (surrogate - BETA * kl) * mask
        loss = -(objective.sum(1) / mask.sum(1)).mean()
        policy.optimizer.zero_grad()
        (rate * loss).backward()
        policy.optimizer.step()
"""
STD, MEAN = " / (r.std(1, keepdim=True) + 1e-4)", ".sum(1) / mask.sum(1)).mean()"
POOLED = ("(r - r.mean(1, keepdim=True))" + STD, "(r - r.mean()) / (r.std() + 1e-4)")
UPDATED, AT_1 = ("old = first", "old = logp.detach()"), ("(pad(tokens)) / T", "(pad(tokens))")
WITHOUT_END = ("(place < end)", "(place < end - 1)")
PACKED = ("pad([*policy(pad(tokens)) / T])",
          "pad([*(policy(torch.cat(tokens)[None])[0] / T).split([*map(len, tokens)])])")
AUTOCAST = ("        logits = pad([*policy(pad(tokens)) / T])[:, :-1]",
            "        with torch.autocast('cpu', torch.bfloat16):\n"
            "            logits = policy(pad(tokens))[:, :-1] / T\n        logits = logits.float()")
EACH_TOKEN = ("pad([*policy(pad(tokens)) / T])[:, :-1]",
              "torch.stack([policy(pad(tokens)[:, :t])[:, -1] / T for t in range(1, 9)], 1)")


def made(*changes, beta=BETA, side="right"):
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
    space = {"torch": torch, "pad": pad, "BETA": beta, "END": END}
    exec(changed(PLAIN, changes), space)
    return space["step"]


@pytest.mark.parametrize("words, changes", [
    ("◐ 3 not asked", []),
    ("≈ each compared with the mean of the others (RLOO)", [(STD, " * 4 / 3")]),
    ("≈ no division by the std, as in Dr. GRPO; a sum over tokens, divided by a constant, as in "
     "Dr. GRPO; the updates are 8, 8 times", [(STD, ""), (MEAN, ".sum(1)).mean()")]),
    # 72 times as large: the clip acts on the second update
    ("– the kit finds no choice", [(STD, ""), (MEAN, ".sum())")]),
    ("≈ the std of the whole batch, as in Lite PPO; a mean over all tokens, as in DAPO",
     [(STD, " / (r.std() + 1e-4)"), (MEAN, ".sum() / mask.sum())")]),
    ("△ if all rewards are equal, the weights become NaN", [(STD, " / r.std(1, keepdim=True)")]),
    ("✗ the std over the questions, std(0)", [(STD, " / (r.std(0, keepdim=True) + 1e-4)")]),
    ("≈ normalised in each group, and then over the batch, as in GDPO", [
        ("A = A.flatten()", "A = A.flatten() / (A.std() + 1e-4)")]),
    ("✗ of a completion that is cut off only the first token", [
        ("[len(text)] for text", "[1 + (torch.tensor(text) == 1).int().argmax()] for text")]),
    ("≈ completions that are cut off are not trained on", [
        ("(place < end)", "(place < end) & torch.tensor([[END in text] for text in completions])"),
        (MEAN, ".sum(1) / mask.sum(1).clamp(min=1)).mean()")]),
    ("✗ zero_grad is forgotten", [("        policy.optimizer.zero_grad()\n", "")]),
    ("✗ the weights do not move", [("(rate * loss)", "(0 * loss)")]),
    ("✗ the sign is turned round", [("loss = -", "loss = ")]),
    ("✗ softmax twice", [("logits.log_softmax(-1)", "logits.softmax(-1).log_softmax(-1)")]),
    ("✗ the mean of the group is not subtracted: a reward without a baseline; no division", [
        ("(r - r.mean(1, keepdim=True))" + STD, "r")]),
    ("✗ completions are kept twice: drawn with replacement", [
        ("kept = range(len(A))", "kept = [0, 0, 1, 4, 5, 8]")]),
    ("◐ 4 not asked", [AUTOCAST]), ("◐ 3 not asked", [EACH_TOKEN]),
    ("≈ the updates are 0.1, 0.2 times", [("(rate * loss)", "((update + 1) / 10 * loss)")]),
    ("◐ 3 not asked: its micro-batches show no difference; it prunes nothing", [PACKED]),
    ("– the kit finds no choice and no mistake",
     [(STD, " * torch.tensor([[0.5], [1.0], [2.0]])")]),
    # divided by the length of prompt and completion; the advantages of other rows
    ("– the kit finds no", [(MEAN, ".sum(1) / (mask.sum(1) + start[:, 0])).mean()")]),
    ("– the kit finds no", [("A = A.flatten()", "A = A.flatten().roll(1)")]),
    ("✗ mean and std of the whole batch", [POOLED]),
    ("✗ the old log-probabilities are those of the updated policy", [UPDATED]),
    ("✗ sampled at one temperature, scored at 1 [5]; the last token, the EOS, is not trained on "
     "[4]; the old log-probabilities are those", [AT_1, WITHOUT_END, UPDATED]),
])
def test_a_choice_is_no_mistake_and_three_mistakes_are_named_if_one_is_the_temperature(
    words, changes
):
    assert said(made(*changes)).startswith(words)


def test_a_loop_that_pads_on_the_left_is_asked_about_padding():
    start = "torch.tensor([[logits.shape[1] + 1 - len(text)] for text in completions])"
    step = made(("torch.tensor([[len(prompt)] for prompt in rows])", start), side="left")
    assert "3 not asked: its micro-batches show no difference; it prunes nothing" in said(step)


def test_the_search_for_a_reason_is_given_up(monkeypatch):
    monkeypatch.setattr(compare, "SEARCH", 0)
    assert said(made(UPDATED)).startswith("– the kit finds no choice and no mistake")


@pytest.mark.parametrize("words, kl", [
    ("◐ 3 not asked", "kl"), ("≈ k2, or k3 × π/sg(π), in place of k3", "(logp - first) ** 2 / 2"),
    ("≈ k3 × ratio in place of k3", "ratio * kl")])
def test_the_kl_may_be_another_one(words, kl):
    assert said(made(("BETA * kl", f"BETA * {kl}"), beta=4.0), 4.0).startswith(words)


BY = "sum([sorted(range(4 * q, 4 * q + 4), key=lambda i: {})[:2] for q in range(3)], [])"
ALL = "range(len(A))"


@pytest.mark.parametrize("words, kept", [
    ("◐ 1 not asked", BY.format("-abs(A[i])")),
    ("◐ 1 not asked", "[4 * q + int(f(r[q])) for q in range(3) "
                           "for f in (torch.argmax, torch.argmin)]"),  # PODS
    ("≈ the largest |A| of all questions together", f"sorted({ALL}, key=lambda i: -abs(A[i]))[:6]"),
    ("≈ the shortest completions", BY.format("len(completions[i])")),
    ("≈ the completions with the most reward per token",
     BY.format("-r.flatten()[i] / len(completions[i])")),
    ("≈ the kept completions change from run to run", BY.format("torch.rand(())")),
    ("– the kit does not know by which rule 2, 2 and 2 completions", BY.format("(i * 7) % 5")),
    ("– the kit does not know by which rule 0, 2 and 2 completions",
     BY.replace("range(3)", "(1, 2)").format("-A[i]")),
    ("– the kit does not know by which rule 4, 0 and 4 completions", "[0, 1, 2, 3, 8, 9, 10, 11]"),
    ("✗ the smallest |A| are kept", BY.format("abs(A[i])")),
    ("✗ the first completions are kept", BY.format("i")),
    ("✗ the first completions are kept", "range(8)"),
    ("✗ the largest A are kept", BY.format("-A[i]")),
])
def test_the_choice_of_the_kept_completions_is_judged_by_all_rewards(words, kept):
    torch.manual_seed(0)  # else two random choices are equal in one run of 216
    assert said(made((f"kept = {ALL}", f"kept = {kept}"))).startswith(words)


@pytest.mark.parametrize("step, words", [
    (lambda *world: None, "✗ the weights do not move"),
    (lambda policy, *world: policy.head.weight.data.add_(1),
     "– nothing could be checked: it makes no update with `policy`"),
    (lambda policy, questions, sampler, reward: made()(policy, questions * 2, sampler, reward),
     "– nothing could be checked: it samples 8 of each question, not sampler.group_size = 4"),
    (lambda *world: 1 / 0, "– nothing could be checked: it raises ZeroDivisionError: division"),
])
def test_a_step_that_cannot_be_checked_is_told(step, words):
    assert said(step).startswith(words)


def test_the_right_steps_hold():
    heated = planted(("temperature=1.0", "temperature=HEAT"),
                     ("logits.float()", "(logits.float() / HEAT)"))
    sign, _, held, asked, left, _ = loops.verdict(partial(of_nano, module=heated), BETA)
    assert (sign, held, asked, left) == ("✓", 15, 15, "")
    *_, left, _ = loops.verdict(partial(of_nano, P=0), BETA)
    assert left.startswith("3 not asked: it samples at temperature 1") and "prunes nothing" in left
