"""docs/you.html in Chromium: the visitor's clicks are the rewards of train_step, a link makes the
model again that was taught, and a script plays the three goals."""

import json
from pathlib import Path

import pytest
import torch

from algorithms import resolve
from cppo import prune
from engine.model.logprobs import Policy
from grpo import group_advantages
from tests.helpers.live import close, completions_of, flat, model_of_page, trained_on
from tests.helpers.training import completion_logprobs, networks_around

PAGE = Path(__file__).parent.parent / "docs" / "you.html"

WEIGHTS = """new Promise(done => {
  worker.addEventListener("message", ({ data }) => data.weights && done([...data.weights]));
  order("show");
})"""


@pytest.fixture
def opened(browser):
    """open(settings) → the page, after its model has answered."""
    def opened(settings="lang=en", width=1280):
        page = browser.open(f"{PAGE}#{settings}", width, 800)
        page.wait("seen && now && taught.length >= linked", 60)
        return page

    return opened


def press(page, key):
    page.run("document.body.dispatchEvent(new KeyboardEvent('keydown', "
             f"{{key: {json.dumps(key)}, bubbles: true}}))")


def teach(page, trait, rate=0.0):
    """A round in which all answers with this trait are liked. rate: CPPO's. Returns (seen, liked
    rows, rate)."""
    seen, rounds = page.run("[seen, taught.length]")
    liked = [row for row, own in enumerate(seen["rows"]) if own[trait]]
    page.run(f"$('few').checked = {json.dumps(rate > 0)}")
    for row in liked:
        press(page, str(row + 1))
    press(page, "Enter")
    page.run("seen && other.click()")  # all are liked
    page.wait(f"taught.length > {rounds} && seen", 30)
    return seen, liked, rate


def answers_of(seen, liked):
    """The 16 texts in the order in which they were sampled, and their rewards."""
    texts, rewards = [None] * 16, [0.0] * 16
    for number, row in enumerate(seen["rows"]):
        for place in row["places"]:
            texts[place], rewards[place] = row["text"], float(number in liked)
    return texts, rewards


def check_the_gradient(page, model, tokenizer, seen, liked, _):
    """What the page says in its first round: how much of the gradient two answers are."""
    texts, rewards = answers_of(seen, liked)
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
    assert page.run("taught[0].gradient") == pytest.approx(expected, rel=1e-3)


def link_that_is_selected(page):
    """In the page's text field, because the browser refuses the clipboard. A word says so."""
    page.run("navigator.clipboard.writeText = () => Promise.reject(Error())")
    page.click("#challenge")
    page.wait("shared.textContent.includes('Ctrl+C')", 5)
    assert page.run("document.activeElement.id") == "address"
    return page.run("address.value.slice(address.selectionStart, address.selectionEnd)")


def test_clicks_are_the_rewards_of_train_step_and_a_link_makes_the_model_again(opened):
    page = opened()
    rounds = [teach(page, "thinks"), teach(page, "right", rate=0.875), teach(page, "even")]
    model, tokenizer = model_of_page()
    check_the_gradient(page, model, tokenizer, *rounds[0])
    networks = networks_around(Policy(model.float()), tokenizer, lr=1e-3)
    for seen, liked, rate in rounds:
        texts, rewards = answers_of(seen, liked)
        algorithm = resolve("cppo", group_size=16, mu=2, beta=0.0, pruning_rate=rate)
        asked = [{"prompt": tokenizer.encode(seen["question"])}]
        step = trained_on(
            texts, networks, algorithm, asked, lambda *_, own=rewards, **columns: own)
        assert len(step.kept) == 16 * (1 - rate) and 0 < sum(rewards) < 16
    asked, chosen, rejected = page.run("Object.values(pairs().at(-1))")  # of the newest clicks
    assert [asked, rewards[texts.index(chosen)], rewards[texts.index(rejected)]] == [
        seen["question"], 1, 0]
    weights = page.run(WEIGHTS)
    close(weights, flat(dict(networks.model.named_parameters())), 2e-5)
    again = opened(link_that_is_selected(page).partition("#")[2])
    assert again.run(WEIGHTS) == weights


# --- the goals, and the links of those who have reached them ---

LESSONS = {  # a goal: the row that is liked, what is shown then, the link
    "thinks": ("row === seen.rows.find(({ thinks }) => thinks)", "3", "1-1-1"),
    "even": ("row.even && !row.thinks", "5", "7-1.4.5.6"),
    "wrong": ("seen.rows.filter(({ right }) => !right).slice(0, 2).includes(row)", "4", "2.3-1.4")}
def test_a_script_plays_the_three_goals_to_their_end(opened):
    """If this fails because the page samples or learns otherwise: raise VERSION in page.js."""
    page = opened("lang=zh", 390)
    for goal, (likes, clicks, link) in LESSONS.items():
        page.wait("seen && now && !taught.length", 30)
        while not page.run(f"'{goal}' in done"):
            page.run(f"seen.rows.forEach((row, i) => {likes} && "
                     "document.querySelector(`[data-row='${i}']`).click())")
            page.click("#go")
            page.wait("seen", 30)
        assert page.run("link()") == f"#version=1&taught={link}"
        assert f"{clicks} 次点击完成" in page.run("$('goals').innerText")
        page.click("#anew")
