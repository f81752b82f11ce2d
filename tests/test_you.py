"""docs/you.html in Chromium: the visitor's clicks are the rewards of train_step, and a link makes
the model again that was taught."""

import json
import random
from pathlib import Path

import pytest
import torch

from algorithms import resolve
from cppo import prune
from engine.model.contract import Sampling
from engine.model.logprobs import Policy
from grpo import group_advantages
from tests.helpers.examples import named
from tests.helpers.live import close, completions_of, flat, model_of_page
from tests.helpers.training import completion_logprobs, networks_around
from train import train_step
from update import Limits

PAGE = Path(__file__).parent.parent / "docs" / "you.html"

WEIGHTS = """new Promise(done => {
  worker.addEventListener("message", ({ data }) => data.weights && done([...data.weights]));
  order("show");
})"""


@pytest.fixture
def opened(browser):
    """open(settings) → the page, after its model has answered."""
    def opened(settings="lang=en"):
        page = browser.open(f"{PAGE}#{settings}", 1280, 900)
        page.wait("seen", 30)
        return page

    return opened


def press(page, key):
    page.run("document.body.dispatchEvent(new KeyboardEvent('keydown', "
             f"{{key: {json.dumps(key)}, bubbles: true}}))")


def teach(page, trait, rate=0.0):
    """A round in which all answers with this trait are liked. rate: CPPO's. Returns (seen, liked
    rows, rate)."""
    seen, rounds = page.run("[seen, past.length]")
    liked = [row for row, own in enumerate(seen["rows"]) if own[trait]]
    page.run(f"$('few').checked = {json.dumps(rate > 0)}")
    for row in liked:
        press(page, str(row + 1))
    press(page, "Enter")
    page.run("seen && other.click()")  # all are liked
    page.wait(f"past.length > {rounds} && seen", 30)
    return seen, liked, rate


def answers_of(seen, liked):
    """The 16 texts in the order in which they were sampled, and their rewards."""
    texts, rewards = [None] * 16, [0.0] * 16
    for number, row in enumerate(seen["rows"]):
        for place in row["places"]:
            texts[place], rewards[place] = row["text"], float(number in liked)
    return texts, rewards


def test_clicks_are_the_rewards_of_train_step_and_a_link_makes_the_model_again(opened):
    page = opened()
    rounds = [teach(page, "thinks"), teach(page, "right", rate=0.875), teach(page, "even")]
    model, tokenizer = model_of_page()
    networks = networks_around(Policy(model.float()), tokenizer, lr=1e-3)
    for seen, liked, rate in rounds:
        texts, rewards = answers_of(seen, liked)
        drawn = completions_of(texts, tokenizer)
        networks.sampler.sample = lambda *_, drawn=drawn: drawn
        algorithm = resolve("cppo", group_size=16, mu=2, beta=0.0, pruning_rate=rate)
        step = train_step(
            networks, algorithm, named(lambda *_, own=rewards, **columns: own), Sampling(48),
            Limits(), [{"prompt": tokenizer.encode(seen["question"])}], random.Random(0))
        assert len(step.rows) == 16 * (1 - rate) and 0 < sum(rewards) < 16
    weights = page.run(WEIGHTS)
    close(weights, flat(dict(networks.model.named_parameters())), 2e-5)
    again = opened(page.run("link()")[1:])
    assert again.run(WEIGHTS) == weights


def test_the_page_says_what_two_answers_are_of_the_gradient(opened):
    page = opened()
    seen, liked, _ = teach(page, "thinks")
    texts, rewards = answers_of(seen, liked)
    model, tokenizer = model_of_page()
    drawn, A = completions_of(texts, tokenizer), group_advantages(torch.tensor([rewards]).double())
    prompts = [tokenizer.encode(seen["question"])] * 16
    logp = completion_logprobs(model, prompts, drawn.tokens, drawn.mask)
    # J_i = A_i/|o_i| Σ_t log π(o_t): the objective at the first update, where all ratios are 1
    J = A[0] * (logp * drawn.mask).sum(1) / drawn.lengths
    weights = list(model.parameters())
    whole = torch.autograd.grad(J.mean(), weights, retain_graph=True)
    of_two = torch.autograd.grad(J[prune(A, 2)[0]].mean(), weights)
    g, h = (torch.cat([part.flatten() for part in parts]) for parts in (whole, of_two))
    expected = {"share": (2 / 16 * g @ h / (g @ g)).item(), "times": (h.norm() / g.norm()).item(),
                "cosine": torch.cosine_similarity(g, h, dim=0).item()}
    assert page.run("past[0].gradient") == pytest.approx(expected, rel=1e-3)
