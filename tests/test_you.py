"""docs/you.html in Chromium: the visitor's clicks are the rewards of train_step, the page shows the
shares of the model that was taught, and a link makes this model again."""

import json
import random
import re
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch.nn.utils import vector_to_parameters

from algorithms import resolve
from answers import extract_answer
from cppo import prune
from engine.model.contract import Sampling
from engine.model.logprobs import Policy
from engine.model.sampler import Sampler
from grpo import group_advantages
from rewards import toy_accuracy
from tests.examples import named
from tests.live import close, completions_of, flat, model_of_page, tensors
from tests.training import completion_logprobs, networks_around
from train import train_step
from update import Limits

PAGE = Path(__file__).parent.parent / "docs" / "you.html"

WEIGHTS = """new Promise(done => {
  worker.addEventListener("message", ({ data }) => data.weights && done([...data.weights]));
  order("show");
})"""
PROBES = ("7+4-2-8+7 3-3+2+7+9 4-1+9+9+5 8+6-5+1-2 "
          "2+2+9-7+3 6-1-3+8+4 9+9-8+5-6 5+7+1-4+6").split()


@pytest.fixture
def opened(browser):
    """open(settings, width, height) → the page, after its model has answered."""
    def opened(settings="lang=en", width=1280, height=900):
        page = browser.open(f"{PAGE}#{settings}", width, height)
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


def test_clicks_are_the_rewards_of_train_step(opened):
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
    close(page.run(WEIGHTS), flat(dict(networks.model.named_parameters())), 2e-5)


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


def measured(weights):
    """Of 64 answers of our sampler: shares that think, are right and even; mean of the tokens."""
    model, tokenizer = model_of_page()
    own = dict(model.named_parameters())
    vector_to_parameters(torch.tensor(weights), [own[name] for name, _ in tensors()])
    prompts = [tokenizer.encode(f"{asked}=?") for asked in PROBES]
    drawn = Sampler(model.float(), tokenizer).sample(prompts, 8, Sampling(48), seed=1)
    texts = drawn.texts(tokenizer)
    gold = [str(eval(asked)) for asked in PROBES for _ in range(8)]
    return {
        "thinks": mean("<think>" in text for text in texts),
        "right": mean(toy_accuracy(texts, gold)),
        "even": mean((extract_answer(text) or "1")[-1] in "02468" for text in texts),
        "tokens": drawn.lengths.float().mean().item(),
    }


@pytest.mark.slow
def test_twelve_clicks_make_thoughts_more_likely_and_a_link_makes_the_model_again(opened):
    page = opened()
    while page.run("taught.flatMap(round => round.liked).length") < 12:
        teach(page, "thinks")
        assert page.run("past.length") < 12
    first, traits, said = page.run("[first, seen.traits, $('said').textContent]")
    assert first["thinks"] < 0.5 and traits["thinks"] > 0.75 and "“thinks”" in said
    weights = page.run(WEIGHTS)
    expected = measured(weights)
    assert traits.pop("tokens") == pytest.approx(expected.pop("tokens"), abs=3)
    assert traits == pytest.approx(expected, abs=0.12)
    again = opened(page.run("link()")[1:])
    assert again.run(WEIGHTS) == weights
    assert "guess" in again.run("guess.innerText") and not again.run("said.checkVisibility()")
    again.click("#reveal")
    assert again.run("said.innerText") == said


@pytest.mark.slow
def test_an_old_link_and_equal_rewards_are_told(opened):
    page = opened("version=000000&taught=1.2-1")
    assert page.run("old.checkVisibility() && past.length === 0")
    for row, _ in enumerate(page.run("seen.rows")):
        assert page.run("go.disabled") == (row == 0)
        press(page, str(row + 1))
    assert page.run("go.disabled") and "nothing to learn" in page.run("$('hint').textContent")
    before = page.run(WEIGHTS)
    press(page, "Enter")
    page.run("[1, 2].map(() => other.click())")
    page.wait("past.length === 1 && seen", 30)
    assert page.run(WEIGHTS) == before
    assert page.run("[past.length, past[0].share, taught.length]") == [1, 1, 1]
    hacked = page.run("""["thinks", "even", "right"].map(name => {
      [first, seen.traits] = [{thinks: .3, even: .3, right: .5}, {thinks: .6, even: .6, right: .2}];
      past = [{pushed: {thinks: 0, even: 0, right: 0, [name]: name === "right" ? -1 : 1}}];
      return story({}).join().includes("reward hacking");
    })""")
    assert hacked == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("width, height", [(1280, 900), (390, 844)])
def test_a_program_clicks_and_the_page_speaks_two_languages(opened, width, height):
    page = opened("lang=zh", width, height)
    page.run("[1, 2].map(() => document.querySelector('[data-wish=even]').click())")
    page.wait("!idea3.hidden && seen", 60)
    assert page.run("[past.length, taught.length, left]") == [8, 8, 0]
    traits, first = page.run("[seen.traits, first]")
    assert traits["even"] > first["even"] + 0.2 and traits["right"] < first["right"] - 0.2
    assert "奖励作弊" in page.run("said.innerText")
    assert len(re.findall("[一-鿿]", page.run("document.body.innerText"))) > 200
    page.click("#lang")
    page.wait("replies.innerText.startsWith('untaught')", 5)
    assert set(re.findall("[一-鿿]+", page.run("document.body.innerText"))) == {"中文"}
    assert "reward hacking" in page.run("said.innerText")
    names = page.run("""[...document.querySelectorAll("a, button, input")]
      .filter(node => node.checkVisibility())
      .map(node => node.innerText || node.labels[0]?.innerText || $("of-own").textContent)""")
    assert len(names) > 10 and all(names)
    assert page.run("document.documentElement.scrollWidth") <= width
