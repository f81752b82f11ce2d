"""docs/explorer.html: the functions of its script compute what the project's functions compute, in
random states (in node); the page shows what they compute, in both languages, on a phone, too (in
Chromium)."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch

from allocate import balance, questions_per_step, step_time
from cppo import batch_rows, keep_count, prune, prune_pooled
from experiments.library.rules import distinct
from grpo import group_advantages
from tests.browser import Browser, needs_chromium
from tests.live import close, needs_node, run_js

PAGE = Path(__file__).parent.parent / "docs" / "explorer.html"
TEXT = PAGE.read_text()
SCRIPT = re.search(r"<script>(.*?)// --- the words ---", TEXT, re.DOTALL)[1]
TRIES = re.findall(r'href="(#[^"]+)"', TEXT.replace("&amp;", "&"))

F64 = torch.float64
RATES = (0, 0.25, 0.5, 0.75, 0.875, 0.9375)
OPTIONS = {
    "G": (4, 8, 8, 16, 16, 32), "P": RATES, "rule": ("largest_abs", "random", "distinct", "pooled"),
    "reward": ("binary", "graded"), "lengths": ("equal", "different"), "devices": (1, 2, 3, 4),
    "B": (1, 1, 2, 3, 4), "sampling": (0, 0.3, 0.75, 1), "pass": (0, 0.02, 0.1, 0.5, 0.8, 1),
    "rewards": ("", "", "0", "0110"), "draw": range(100),
}  # fmt: skip


def states(n):
    """Random settings of the page. At least one completion is kept."""
    rng = random.Random(4)
    found = ({name: rng.choice(each) for name, each in OPTIONS.items()} for _ in itertools.count())
    return list(itertools.islice((s for s in found if s["G"] * (1 - s["P"]) >= 1), n))


# --- the functions ---

COMPUTE = """return given.states.map(s => {
  const { k, n, devices, g, h, curve, left } = compute(s);
  const rows = kept => kept.map(c => [c.q, c.i, c.tokens]);
  const parts = d => [d.sampled, d.pruned, d.allocated].map(rows);
  const lengths = devices.flatMap(d => d.allocated).map(c => c.tokens);
  return { k, n, g, h, curve: curve.map(([, cosine]) => cosine ?? null), left,
           devices: devices.map(parts), questions: devices[0].questions,
           seconds: stepTime(devices.map(d => tokens(d.allocated))),
           balanced: stepTime(balance(lengths, s.devices)) };
});"""


@pytest.fixture(scope="module")
def computed():
    """[(state, what the page computes)]"""
    chosen = states(120)
    return list(zip(chosen, run_js(COMPUTE, SCRIPT, states=chosen)))


def values(view, name):
    """A column of the questions of device 1: (B, G)."""
    return torch.tensor([[row[name] for row in group] for group in view["questions"]], dtype=F64)


def kept_by(rule, A, k):
    """Rows among those of one device."""
    if rule == "pooled":
        # questions with as many right ones have the same |A|; torch's std may round it in two ways
        return prune_pooled(A.round(decimals=9), k * len(A))
    if rule == "distinct":
        return distinct(None, A, k)
    return batch_rows(prune(A, k), A.shape[1])


@needs_node
def test_advantages_and_the_kept_are_those_of_the_functions(computed):
    for s, view in computed:
        A = group_advantages(values(view, "reward"))
        close([[row["advantage"] for row in group] for group in view["questions"]], A)
        k, G, B = keep_count(s["G"], s["P"]), s["G"], s["B"]
        assert (view["k"], view["n"]) == (k, questions_per_step(B, G, k))
        sampled, kept, _ = view["devices"][0]
        assert [(q, i) for q, i, _ in sampled] == [(q + 1, i) for q in range(B) for i in range(G)]
        rows = [(q - 1) * G + i for q, i, _ in kept]
        if s["rule"] == "random":
            assert [row // G for row in rows] == [q for q in range(B) for _ in range(k)]
            assert rows == sorted(set(rows))
        else:
            assert rows == kept_by(s["rule"], A, k).tolist()


def questions(rows):
    return {q for q, *_ in rows}


@needs_node
def test_each_device_gets_other_questions(computed):
    for s, view in computed:
        taken = []
        for sampled, pruned, allocated in view["devices"]:
            own = questions(sampled)
            assert len(own) == s["B"] and questions(pruned) <= own
            all_of_device = questions(allocated) | own
            assert len(all_of_device) <= view["n"]
            if s["rule"] in ("largest_abs", "random"):
                assert allocated[: len(pruned)] == pruned
                assert len(allocated) == view["n"] * view["k"]
            taken += all_of_device
        assert len(taken) == len(set(taken))


@needs_node
def test_the_time_of_a_step_is_that_of_its_tokens(computed):
    for s, view in computed:
        lengths = [[tokens for *_, tokens in allocated] for *_, allocated in view["devices"]]
        every = sum(lengths, [])
        shares = [[every[i] for i in share] for share in balance(every, s["devices"])]
        for name, each in ("seconds", lengths), ("balanced", shares):
            right = step_time([sum(own) for own in each], overhead=2, seconds_per_token=0.01)
            assert view[name] == pytest.approx(right)
        kept, sampled = (sum(len(d[part]) for d in view["devices"]) for part in (1, 0))
        share = s["sampling"]  # Amdahl's law
        assert view["left"] == pytest.approx(share + (1 - share) * kept / sampled)


def gradient(s, view, rows):
    """∇ of CPPO's objective at the first update on these rows of device 1, by question 1's six
    logits and by its two logits to stop (for wrong and for right answers)."""
    p = min(max(s["pass"], 0.01), 0.99)
    logits = torch.tensor([p] + 5 * [(1 - p) / 5], dtype=F64).log().repeat(s["B"], 1)
    stop = torch.tensor([1 / 6, 1 / 24], dtype=F64).logit().repeat(s["B"], 1)
    learned = logits.requires_grad_(), stop.requires_grad_()
    answers, right = values(view, "answer").long(), values(view, "right").long()
    length = values(view, "length")
    logp = logits.log_softmax(1).gather(1, answers)
    if s["lengths"] == "different":  # each token goes on, and the last one stops
        z = stop.gather(1, right)
        logp = logp + z.sigmoid().log() + (length - 1) * (-z).sigmoid().log()
    # J = 1/N Σ_i A_i/|o_i| log π(o_i): each ratio is 1
    J = group_advantages(values(view, "reward")) * logp / length
    parts = torch.autograd.grad(
        J.flatten()[rows].mean(), learned, allow_unused=True, materialize_grads=True)
    return torch.cat([part[0] for part in parts])


@needs_node
def test_the_gradients_are_those_of_the_objective_and_so_are_the_cosines(computed):
    for s, view in computed[:40]:
        G = s["G"]
        rows = [(q - 1) * G + i for q, i, _ in view["devices"][0][1]]
        g = gradient(s, view, slice(None))
        close(view["g"], g, 1e-6)
        close(view["h"], gradient(s, view, rows), 1e-6)
        if s["rule"] != "random":
            A = group_advantages(values(view, "reward"))
            for k in (1, G // 2, G):
                h = gradient(s, view, kept_by(s["rule"], A, k))
                cosine = (g @ h / g.norm() / h.norm()).item() if g.any() and h.any() else None
                if cosine and g.norm() * h.norm() > 1e-9:  # less is rounding
                    assert view["curve"][k - 1] == pytest.approx(cosine, abs=1e-5)


@needs_node
def test_the_made_up_completions_are_as_the_page_says():
    """As often right as p says, graded as it says, and of mean length 24 (right) and 6 (wrong)."""
    drawn = run_js("""
      const s = { ...DEFAULT, G: 32, pass: 0.3, reward: "graded", lengths: "different" };
      const groups = Array.from({ length: 500 }, (_, draw) => question(1, { ...s, draw }));
      const again = question(1, { ...s, draw: 3, rewards: "01" }).map(c => c.right);
      return [groups.flat().map(c => [c.right, c.reward, c.tokens]), again];""", SCRIPT)
    right, reward, tokens = torch.tensor(drawn[0], dtype=F64).T
    assert right.mean() == pytest.approx(0.3, abs=0.02)
    assert {*reward[right == 1].tolist()} == {1.5, 2, 2.5, 3}
    assert {*reward[right == 0].tolist()} == {0, 1}
    means = [tokens[right == is_right].mean().item() for is_right in (0, 1)]
    assert means == pytest.approx([6, 24], rel=0.05)
    assert drawn[1] == [0, 1] * 16  # rewards by hand


# --- addresses ---

BROKEN = [
    "#", "#nonsense", "#&&==%E0%A4%A&G", "#G=&P=&rule=&pass=&draw=&rewards=&completion=&devices=",
    "#G=banana&P=7&rule=best&pass=NaN&draw=-1&rewards=012&completion=x&devices=0&B=1e9&sampling=2",
    "#rewards=01010&completion=17&devices=5&B=0.5&draw=1.5&pass=-0.1&P=0.8750&rule=toString&lang=fr"
    "&G=constructor",
]  # fmt: skip


@needs_node
def test_a_broken_address_gives_the_first_settings_and_a_link_to_try_what_it_names():
    first, broken, tried, fewer = run_js("""
      const read = hash => parse(hash, DEFAULT);
      return [DEFAULT, given.broken.map(read), given.tries.map(read), read("#G=4&P=0.9375")];
    """, SCRIPT, broken=BROKEN, tries=TRIES)
    assert broken == [first] * len(BROKEN) and fewer["P"] == 0.75
    for link, settings in zip(TRIES, tried, strict=True):
        named = dict(word.split("=") for word in link[1:].split("&"))
        assert {name: str(settings[name]) for name in named} == named and settings != first


def test_the_page_loads_nothing_and_names_no_other_address():
    loads = r"https?:|\bsrc\s*=|@import|url\((?!#)|\bfetch\(|\bimport\b|XMLHttpRequest"
    assert not re.search(loads, TEXT)
    links = set(re.findall(r'href="([^"]*)"', TEXT.replace("&amp;", "&")))
    assert links == {"data:,", "#", "live.html", "..", "reading.md", *TRIES}


# --- in the browser ---

SHOWN = """(() => {
  const texts = (selector, from = document) =>
    [...from.querySelectorAll(selector)].map(node => node.textContent);
  const places = [...document.querySelectorAll(".stage")].map(stage =>
    [...stage.querySelectorAll(".places")].map(one => texts("i:not(.empty)", one).map(Number)));
  const kept = [...document.querySelectorAll("#completions .kept .number")];
  const { cosine, ratio } = compare(shown.g, shown.h) || {};
  return {
    values: texts("#completions .value"), kept: kept.map(node => node.textContent - 1), places,
    results: texts(".formula b, b", document.querySelector("main")), costs: texts("#costs div"),
    right: { values: shown.group.map(c => signed(c.advantage)), kept: shown.own.map(c => c.i),
             places: ["sampled", "pruned", "allocated"].map(part =>
               shown.devices.map(device => device[part].map(c => c.q))),
             lengths: ["sampled", "pruned", "allocated"].map(part =>
               shown.devices.map(device => tokens(device[part]))),
             questions: [state.B, state.B, shown.n].map(each => each * state.devices),
             results: [cosine === undefined ? "" : fixed(cosine, 3), ratio?.toFixed(2) ?? "",
                       String(shown.k), String(shown.n)] },
  };
})()"""
ADDRESSES = [
    "#", "#G=32&P=0&devices=4&B=4&sampling=0.3", "#G=32&P=0.9375&devices=4&B=4&rule=pooled",
    "#P=0.9375&pass=0.02&rule=random&draw=12", "#pass=1&draw=9999&B=3&completion=5&sampling=0.7",
    "#rule=distinct&reward=graded&lengths=different&P=0.5&rewards=0110",
]  # fmt: skip
NUMBER = re.compile(r"[−+]?\d+(?:\.\d+)?(?:e-\d+)?")
# what stays in Latin letters
NAMES = {"en", "zh", "English", "GRPO", "CPPO", "softmax", "token"}
SAID = """[document.documentElement.lang, document.title, document.body.innerText,
  ...[...document.querySelectorAll("main [aria-label], main [title]")].map(
    node => node.ariaLabel ?? node.title)].join("\\n")"""


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("address", ADDRESSES)
def test_the_page_shows_what_it_computes_in_both_languages_on_a_phone_too(browser, address):
    page = browser.open(f"{PAGE}{address}", 390, 844)
    found = page.run(SHOWN)
    right = found.pop("right")
    assert all(found[name] == right[name] for name in ("values", "kept", "places"))
    assert set(right["results"]) <= {"", *found["results"]}
    times = [step_time(tokens, overhead=2, seconds_per_token=0.01) for tokens in right["lengths"]]
    costs = [float(text.split()[0]) for text in found["costs"]]
    assert costs == pytest.approx([t / q for t, q in zip(times, right["questions"])], abs=0.0051)
    texts = {}
    for lang in ("zh", "en"):
        page.click(f"[name=lang][value={lang}]")
        texts[lang] = page.run(SAID)
        assert page.run("document.documentElement.scrollWidth") <= 390
    assert set(re.findall("[一-鿿]+", texts["en"])) == {"中文"}
    assert set(re.findall("[A-Za-z]{2,}", texts["zh"])) <= NAMES
    assert sorted(NUMBER.findall(texts["zh"])) == sorted(NUMBER.findall(texts["en"]))
    assert page.problems() == []


def enter(page):
    key = {"key": "Enter", "text": "\r", "windowsVirtualKeyCode": 13}
    for kind in ("keyDown", "keyUp"):
        page.ask("Input.dispatchKeyEvent", type=kind, **key)


@pytest.mark.slow
@needs_chromium
def test_settings_keys_and_links_change_the_page_and_its_address_shows_the_same_again(browser):
    page = browser.open(f"{PAGE}#lang=en", 1280, 900)
    for selector in ("[name=rule][value=pooled]", "[name=G][value='8']", "[name=P][value='0.5']"):
        page.click(selector)
    page.run("pass.value = 0.4, pass.dispatchEvent(new Event('input'))")
    before = page.run("shown.group.map(c => c.right)")
    page.run("$('completions').children[2].focus()")
    for _ in range(2):  # the first press shows a completion, the second flips its reward
        enter(page)
    before[2] = 1 - before[2]
    assert page.run("shown.group.map(c => c.right)") == before
    assert page.run("document.activeElement === $('completions').children[2]")
    for is_open in (True, False):  # box 4 is folded
        page.run("document.querySelector('summary').focus()")
        assert page.run("document.querySelector('details').open") is not is_open
        enter(page)
        assert page.run("document.querySelector('details').open") is is_open
    page.click(f".try a[href={json.dumps(TRIES[-1])}]")
    page.run("new Promise(done => setTimeout(done, 400))")  # the address is written a little later
    again = browser.open(f"{PAGE}{page.run('location.hash')}", 1280, 900)
    state = again.run("state")
    assert again.run(SAID) == page.run(SAID) and state == page.run("state")
    chosen = {"rule": "pooled", "G": 8, "P": 0.5, "pass": 0.4, "completion": 3}
    assert chosen.items() <= state.items()
    names = page.run("""[...document.querySelectorAll("a, button, input")].map(node =>
      node.tabIndex >= 0 && (node.ariaLabel || [node, ...node.labels ?? []].map(
        named => named.textContent.trim()).join("")))""")
    assert len(names) > 30 and all(names) and page.problems() == again.problems() == []
