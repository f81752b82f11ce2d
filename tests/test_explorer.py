"""docs/explorer.html: the functions of its script compute what the project's functions compute (in
node), and the page shows what they compute, in both languages, on a phone (in Chromium)."""

import random
import re
from pathlib import Path

import pytest
import torch

from allocate import balance, questions_per_step, step_time
from cppo import batch_rows, keep_count, prune, prune_pooled
from grpo import group_advantages
from tests.browser import Browser, needs_chromium
from tests.live import close, needs_node, run_js

PAGE = Path(__file__).parent.parent / "docs" / "explorer.html"
F64 = torch.float64
SCRIPT = re.search(r"<script>(.*?)// --- the words ---", PAGE.read_text(), re.DOTALL)[1]

# --- the numbers ---

COMPUTE = """return given.states.map(s => {
  const { k, n, devices, g, h, left } = compute(s);
  const rows = kept => kept.map(c => [c.q, c.i]);
  const [{ questions, sampled, pruned }] = devices;
  const lengths = devices.map(d => d.allocated.map(c => c.tokens));
  return { k, n, g, h, left, questions, lengths, sampled: rows(sampled), pruned: rows(pruned),
           own: devices.map(d => [d.sampled, d.allocated].map(kept => kept.map(c => c.q))),
           all: devices.map(d => [d.sampled.length, d.pruned.length]),
           seconds: stepTime(devices.map(d => tokens(d.allocated))),
           balanced: stepTime(balance(lengths.flat(), s.devices)) };
});"""


def states(n):
    """Random settings of the page."""
    rng = random.Random(4)
    for _ in range(n):
        G = rng.choice((4, 8, 16, 32))
        yield {
            "G": G, "P": rng.choice([P for P in (0, 0.25, 0.5, 0.75, 0.875) if G * (1 - P) >= 1]),
            "rule": rng.choice(("largest_abs", "pooled")), "lengths": "different",
            "reward": rng.choice(("binary", "graded")), "devices": rng.randint(1, 4),
            "B": rng.randint(1, 4), "sampling": 0.3, "pass": rng.choice((0.1, 0.5, 0.8)),
            "rewards": "", "draw": rng.randrange(100),
        }  # fmt: skip


def gradient(s, logits_and_stop, answers, right, lengths, A, rows):
    """∇ of CPPO's objective at the first update on these rows of device 1, by question 1's six
    logits and by its two logits to stop (for wrong and for right answers)."""
    logits, stop = logits_and_stop
    logp = logits.log_softmax(1).gather(1, answers.long())
    z = stop.gather(1, right.long())  # each token goes on, and the last one stops
    logp = logp + z.sigmoid().log() + (lengths - 1) * (-z).sigmoid().log()
    # J = 1/N Σ_i A_i/|o_i| log π(o_i): each ratio is 1
    J = (A * logp / lengths).flatten()[rows].mean()
    return torch.cat([part[0] for part in torch.autograd.grad(J, logits_and_stop)])


@needs_node
def test_the_numbers_are_those_of_the_functions():
    chosen = list(states(60))
    for s, view in zip(chosen, run_js(COMPUTE, SCRIPT, states=chosen)):
        G, B, P = s["G"], s["B"], s["P"]
        k, names = keep_count(G, P), ("reward", "advantage", "answer", "right", "length")
        rewards, advantages, *drawn = (
            torch.tensor([[row[name] for row in group] for group in view["questions"]], dtype=F64)
            for name in names)
        A = group_advantages(rewards)
        close(advantages.tolist(), A)
        assert (view["k"], view["n"]) == (k, questions_per_step(B, G, k))
        # questions with as many right ones have the same |A|; torch's std may round it in two ways
        kept = (prune_pooled(A.round(decimals=9), k * B) if s["rule"] == "pooled"
                else batch_rows(prune(A, k), G)).tolist()
        assert [(q - 1) * G + i for q, i in view["pruned"]] == kept
        asked = [{*sampled, *allocated} for sampled, allocated in view["own"]]
        assert len(set.union(*asked)) == sum(map(len, asked))  # each device has its own questions

        every = sum(view["lengths"], [])
        shares = [[every[i] for i in share] for share in balance(every, s["devices"])]
        for name, each in ("seconds", view["lengths"]), ("balanced", shares):
            right = step_time([sum(own) for own in each], overhead=2, seconds_per_token=0.01)
            assert view[name] == pytest.approx(right)
        sampled, pruned = map(sum, zip(*view["all"]))
        assert view["left"] == pytest.approx(0.3 + 0.7 * pruned / sampled)  # Amdahl's law

        p = s["pass"]
        logits = torch.tensor([p] + 5 * [(1 - p) / 5]).double().log().repeat(B, 1)
        stop = torch.tensor([1 / 6, 1 / 24]).double().logit().repeat(B, 1)
        learned = logits.requires_grad_(), stop.requires_grad_()
        close(view["g"], gradient(s, learned, *drawn, A, slice(None)), 1e-6)
        close(view["h"], gradient(s, learned, *drawn, A, kept), 1e-6)


# --- in the browser ---

SHOWN = """(() => {
  const texts = (selector, from = document) =>
    [...from.querySelectorAll(selector)].map(node => node.textContent);
  const places = [...document.querySelectorAll(".stage")].map(stage =>
    [...stage.querySelectorAll(".places")].map(one => texts("i:not(.empty)", one).map(Number)));
  return [[texts("#completions .value"), places], [
    shown.group.map(c => signed(c.advantage)),
    ["sampled", "pruned", "allocated"].map(part =>
      shown.devices.map(device => device[part].map(c => c.q)))]];
})()"""
NUMBER = re.compile(r"[−+]?\d+(?:\.\d+)?(?:e-\d+)?")


@pytest.mark.slow
@needs_chromium
def test_the_page_shows_what_it_computes_in_both_languages_on_a_phone():
    with Browser() as browser:
        page = browser.open(f"{PAGE}#G=32&P=0.9375&devices=4&B=4&rule=pooled", 390, 844)
        seen, computed = page.run(SHOWN)
        assert seen == computed
        texts = {}
        for lang in ("zh", "en"):
            page.click(f"[name=lang][value={lang}]")
            texts[lang] = page.run("document.title + document.body.innerText")
            assert page.run("document.documentElement.scrollWidth") <= 390
        assert set(re.findall("[一-鿿]+", texts["en"])) == {"中文"}
        assert sorted(NUMBER.findall(texts["zh"])) == sorted(NUMBER.findall(texts["en"]))
        assert page.problems() == []
