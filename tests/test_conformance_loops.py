"""conformance/loops.py: a whole step is run, and what is wrong with it is read from the weights."""

import random
import re
import types
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nano
from algorithms import resolve
from conformance import loops
from conformance.loops import END, PADDING
from engine.model.contract import Completions, Sampling
from engine.model.logprobs import Policy
from engine.model.networks import Networks
from tests.examples import mask_of, named
from train import train_step
from update import Limits

BETA = 0.04
digits = lambda tokens: "".join(str(int(token)) for token in tokens)


class Digits:
    """A tokenizer: a text is the digits of its tokens."""

    pad_token_id, eos_token_id = PADDING, END

    def apply_chat_template(self, chat, **options):
        return chat[-1]["content"]

    def __call__(self, texts, **options):
        longest = max(map(len, texts))
        ids = torch.tensor([[*map(int, text.rjust(longest, "0"))] for text in texts])
        return SimpleNamespace(input_ids=ids, attention_mask=(ids != PADDING).long())

    def decode(self, tokens, **options):
        return digits(tokens)


class Backbone(torch.nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, input_ids, **options):
        return SimpleNamespace(last_hidden_state=self.policy.states(input_ids))


class Language(torch.nn.Module):
    """The table as a causal language model of transformers, as far as nano.py and train.py use it.
    """

    device = torch.device("cpu")
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=8))

    def __init__(self, policy, sampler):
        super().__init__()
        self.policy, self.sampler, self.base_model = policy, sampler, Backbone(policy)

    def generate(self, input_ids, temperature, **options):
        return self.sampler.extend(input_ids, temperature)

    def forward(self, tokens, **options):
        return SimpleNamespace(logits=self.policy(tokens))

    def get_output_embeddings(self):
        return self.policy.head


def of_nano(policy, questions, sampler, reward, *, module=nano, P=0.5):
    """nano.step on the probe."""
    module.G, module.P = sampler.group_size, P
    model = Language(policy, sampler)
    task = SimpleNamespace(system_prompt="", examples=[], max_new_tokens=sampler.longest)
    asked = [{"question": digits(prompt), "answer": digits(prompt)} for prompt in questions]
    module.step(
        model, deepcopy(model), policy.optimizer, Digits(), task,
        lambda texts, answer: [*map(reward, answer, texts)], asked)


@pytest.fixture(autouse=True)
def numbers_of_nano(monkeypatch):
    for name in ("G", "P"):
        monkeypatch.setattr(nano, name, getattr(nano, name))


def of_train(policy, questions, sampler, reward, **options):
    """train.py's train_step on the probe."""
    model = Language(policy, sampler)

    def sample(prompts, group_size, sampling, *_):
        drawn = sampler([p for p in prompts for _ in range(group_size)], sampling.temperature)
        lengths = torch.tensor([*map(len, drawn)])
        tokens = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, drawn)], batch_first=True)
        mask = mask_of(lengths.tolist())
        return Completions(tokens, lengths, lengths < 0, torch.zeros(tokens.shape), mask)

    scorer = partial(Policy, shares_prompts=False, temperature=sampler.temperature)
    networks = Networks(
        scorer(model), Digits(), SimpleNamespace(
            sample=sample, dtype=torch.float32, free_memory=lambda: None,
            refresh=lambda weights: None),
        policy.optimizer, scorer(deepcopy(model)))
    algorithm = resolve(
        "cppo", group_size=sampler.group_size, mu=2, beta=BETA, questions_per_step=3, **options)
    rule = named(lambda texts, question: [*map(reward, question, texts)])
    asked = [{"prompt": prompt, "question": digits(prompt)} for prompt in questions]
    train_step(
        networks, algorithm, rule, Sampling(sampler.longest, sampler.temperature),
        Limits(micro_batch_tokens=24), lambda _: asked, random.Random(0))


def planted(*changes):
    """nano.py with other lines: a module."""
    text = Path(nano.__file__).read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = types.ModuleType("planted")
    exec(text, vars(module))
    return module


GOLD = 'gold = [question["answer"] for question in questions for _ in range(G)]'
FAULTS = {
    "temperature": (("temperature=1.0, top_k", "temperature=0.7, top_k"),),
    "EOS": (("is_eos.cumsum(1) - is_eos.long() == 0", "is_eos.cumsum(1) == 0"),),
    "EOS counted": (("ref_logp=ref_logp, beta=BETA", "ref_logp=ref_logp, beta=BETA, weights="
                     "torch.cat([m[:, 1:], m[:, :1] & False], 1) / m.sum(1, keepdim=True) "
                     "/ len(m)"),),
    "padding": (("is_eos.cumsum(1) - is_eos.long() == 0", "is_eos.cumsum(1) >= 0"),),
    "prompt": (("    if A.any():", "    m, T = whole[1][:, 1:].bool(), whole[0].shape[1] - 1\n"
                "    if A.any():"),),
    "rows": (
        ("        texts += [text] * G", "        texts.append(text)\n    texts = texts * G"),
        (GOLD, 'gold = [question["answer"] for _ in range(G) for question in questions]')),
    "another question": (
        ("texts += [text] * G", "texts += [text, *(texts or [text])[:1] * (G - 1)]"),
        (GOLD, 'gold = [questions[q if i == 0 else 0]["answer"] for q in range(3) '
               'for i in range(G)]')),
    "scored": (("        texts += [text] * G", "        texts.append(text)\n    texts *= G"),),
    "after pruning": (("A, m, T = advantages.flatten()[rows]", "A, m, T = group_advantages("
                       "scores.flatten()[rows].view(len(questions), -1)).flatten()"),),
    "updated": (("logp.detach() if old_logp is None else old_logp", "logp.detach()"),),
    "no signal": (("if A.any():", "if True:"),),
    "two": (("temperature=1.0, top_k", "temperature=0.7, top_k"),
            ("logp.detach() if old_logp is None else old_logp", "logp.detach()")),
    "unknown": (("loss.backward()", "(2 * loss).backward()"),),
}
SAID = {
    "temperature": "✗ sampled at one temperature, scored at 1 [5]",
    "EOS": "✗ the last token, the EOS, is not trained on [4]",
    "EOS counted": "✗ the last token, the EOS, is not trained on, but |o| counts it [4]",
    "padding": "✗ padding is trained on",
    "prompt": "✗ the tokens of the prompt are trained on",
    "rows": "✗ rows of a group are not one question: G consecutive rows are compared",
    "another question": "✗ rows of a group are not one question: G = 4 completions of each are",
    "scored": "✗ rows of a group are not one question: a completion was scored with another",
    "after pruning": "✗ the advantages are taken after pruning",
    "updated": "✗ the old log-probabilities are those of the updated policy",
    "no signal": "≈ an update without a signal",
    "two": "✗ sampled at one temperature, scored at 1 [5]; the old log-probabilities are those of",
    "unknown": "✗ no known mistake gives these weights",
}


def said(step, beta=BETA):
    sign, sentence, *_ = loops.verdict(step, beta)
    return f"{sign} {sentence}"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_that_is_planted_in_nano_is_found(fault):
    module = planted(*FAULTS[fault])
    assert said(partial(of_nano, module=module)).startswith(SAID[fault])


PIECES = """
            optimizer.zero_grad()
            pieces = torch.arange(len(A)).split(4)
            for some in pieces:
                logp = logprobs(model, whole[0][some], whole[1][some], T)
                {}
                loss.backward()
            optimizer.step()
        for _ in ():
"""


@pytest.mark.parametrize("line, words", [
    ("loss = cppo_loss(logp, logp.detach(), A[some], m[some])[0] / len(pieces)",
     "✗ a mean of means over micro-batches [3]"),
    ("loss = cppo_loss(logp, logp.detach(), A[some], m[some])[0]",
     "✗ the means of micro-batches are added up [3]"),
    ("loss = cppo_loss(logp, logp.detach(), A[some], m[some])[0] * len(some) / len(A)", "◐ "),
    ("loss = -((logp * A[some, None] * m[some]).sum(1) / T / len(A)).sum()",
     "✗ divided by the padded length, not by |o| [3]"),
])
def test_micro_batches_with_means_of_their_own_are_found(line, words):
    """One update over six kept rows, which are cut into four and two."""
    module = planted(("        for _ in range(MU):\n", f"        if True:{PIECES.format(line)}"))
    assert said(partial(of_nano, module=module)).startswith(words)


def test_one_logit_by_hand():
    """Question 1: its completions begin with a, b, b, a, and have 2, 3, 4 and 4 tokens."""
    rows = [(question, number) for question in loops.COMPLETIONS for number in range(4)]
    start, pi = loops.first_table(), loops.first_table().softmax(1)[loops.FIRST, loops.A]
    moved = (loops.expected({}, [[rows]], rows, 1.0, 0.0) - start)[loops.FIRST, loops.A]
    # A = (1.5, −0.5, −0.5, −0.5): Σ A_i / (12 |o_i|) (1[o_i1 = a] − π(a))
    slope = 1.5 / 2 * (1 - pi) - 0.5 / 3 * -pi - 0.5 / 4 * -pi - 0.5 / 4 * (1 - pi)
    assert moved == pytest.approx(loops.RATE * slope / 12)


def test_the_evidence_is_the_logit_that_differs_most():
    *_, [evidence] = loops.verdict(partial(of_nano, module=planted(*FAULTS["EOS"])), BETA)
    words = r"the logit of `\w+` behind `[\w ]+` moved by -?0\.\d{4}, right is -?0\.\d{4}"
    assert re.fullmatch(words, evidence)


@pytest.mark.parametrize("step, words", [
    (lambda *world: None, "– nothing could be checked: it makes no update with `policy`"),
    (lambda *world: 1 / 0, "– nothing could be checked: it raises ZeroDivisionError: division"),
])
def test_a_step_that_cannot_be_checked_is_told(step, words):
    assert said(step).startswith(words)


def test_the_right_steps_hold():
    sign, _, held, asked, left, _ = loops.verdict(partial(of_train, pruning_rate=0.5), BETA)
    assert (sign, held, asked) == ("✓", 10, 10)
    *_, left, _ = loops.verdict(of_nano, BETA)
    assert left == ("8 of 10 checked, because it samples at temperature 1; its micro-batches show "
                    "no difference")
    *_, left, _ = loops.verdict(partial(of_nano, P=0), BETA)
    assert left.startswith("7 of 10") and "it prunes nothing" in left
