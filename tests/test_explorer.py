"""docs/explorer.html: in 200 states the page shows what the project's functions compute; keyboard,
phone and Chinese work.

Chromium opens a copy of the page to which a script is added. The script works the page's own
controls, reads what the page shows, and leaves it in the document, which Chromium prints. One start
of the browser is enough for all tests.
"""

import html
import json
import math
import random
import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
import torch

from allocate import balance, questions_per_step, step_time
from cppo import batch_rows, cppo_loss, keep_count, prune, prune_pooled
from experiments.reproduce import amdahl
from experiments.rules import distinct
from grpo import group_advantages
from tests.browser import CHROMIUM

PAGE = Path(__file__).parent.parent / "docs" / "explorer.html"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page"),
]

F64 = torch.float64
RATES = (0, 0.25, 0.5, 0.75, 0.875, 0.9375)
RULES = ("largest_abs", "random", "distinct", "pooled")
FIRST = {
    "G": 16, "P": 0.875, "rule": "largest_abs", "devices": 2, "B": 1, "pass": 0.2,
    "sampling": 0.5, "draw": 3, "reward": "binary", "lengths": "equal",
    "flipped": frozenset(), "chosen": 0,
}  # fmt: skip
COST = {"overhead": 2, "seconds_per_token": 0.01}

# --- what is done to the page ---


def walk(n):
    """[(what is done, the state after it)]: in each step some settings change, and some completions
    are clicked.

    A state also says which rewards of question 1 are flipped by hand, and which completion is
    `chosen` for the formula (from 1; 0: the first that is kept).
    """
    rng, state = random.Random(4), FIRST
    for _ in range(n):
        G = rng.choice((4, 4, 8, 8, 16, 16, 32))
        new = {
            "G": G, "P": rng.choice([P for P in RATES if min(G, state["G"]) * (1 - P) >= 1]),
            "rule": rng.choice(RULES), "reward": rng.choice(("binary", "graded")),
            "lengths": rng.choice(("equal", "different")),
            "devices": rng.choice((1, 1, 2, 3, 4)), "B": rng.choice((1, 1, 1, 2, 2, 3, 4)),
            "sampling": rng.randint(0, 100) / 100,
            "pass": rng.choice((0, 1, 0.5, rng.randint(0, 100) / 100, rng.randint(1, 15) / 100)),
        }  # fmt: skip
        names = [name for name in new if rng.random() < 0.35 and new[name] != state[name]]
        now = {**state, **{name: new[name] for name in names}}
        if now["G"] * (1 - now["P"]) < 1:
            now["P"] = max(P for P in RATES if now["G"] * (1 - P) >= 1)
        again = rng.random() < 0.4
        if again or now["G"] != state["G"]:
            now |= {"draw": state["draw"] + again, "chosen": 0, "flipped": frozenset()}
        if "pass" in names:
            now["flipped"] = frozenset()
        taps = rng.choices(rng.sample(range(now["G"]), 3), k=rng.choice((0, 0, 2, 6)))
        for i in taps:
            if now["chosen"] == i + 1:  # the second tap flips
                now["flipped"] ^= {i}
            now["chosen"] = i + 1
        yield {"set": {name: new[name] for name in names}, "again": again, "taps": taps}, now
        state = now


ACTIONS, STATES = zip(*walk(200))
SIZES = [(1280, 900), (800, 600), (390, 844)]
# opened by their address, in a window of 390 pixels
LARGE = {
    "#G=32&P=0&devices=4&B=4&sampling=0.3": {
        "G": 32, "P": 0, "devices": 4, "B": 4, "sampling": 0.3,
    },
    "#G=32&P=0.9375&devices=4&B=4&rule=pooled": {
        "G": 32, "P": 0.9375, "devices": 4, "B": 4, "rule": "pooled",
    },
    # turned back
    "#P=0.9375&pass=0.02&rule=random&draw=12": {
        "P": 0.9375, "pass": 0.02, "rule": "random", "draw": 12,
    },
    "#pass=1&draw=9999&B=3&completion=5&sampling=0.7": {
        "pass": 1, "draw": 9999, "B": 3, "chosen": 5, "sampling": 0.7,
    },
}
BROKEN = [
    "#", "#nonsense", "#&&==%E0%A4%A&G",
    "#G=&P=&rule=&pass=&draw=&rewards=&completion=&devices=&B=&sampling=",
    "#G=banana&P=7&rule=best&pass=NaN&draw=-1&rewards=012&completion=x&devices=0&B=1e9&sampling=2",
    "#rewards=01010&completion=17&devices=5&B=0.5&draw=1.5&pass=-0.1&P=0.8750&rule=toString&lang=fr"
    "&G=constructor",
]  # fmt: skip
IN_CHINESE = [  # the first keeps nothing of question 1, and the last is opened by a Chinese browser
    "#lang=zh&G=32&P=0.9375&devices=4&B=4&rule=pooled&draw=4",
    "#lang=zh&G=32&pass=1&devices=1&rule=distinct&sampling=0", "?browser=zh",
]  # fmt: skip
# what stays in Latin letters
NAMES = {"en", "zh", "English", "GRPO", "CPPO", "softmax", "token"}
TRIES = re.findall(r'href="(#[^"]+)"', PAGE.read_text().replace("&amp;", "&"))

# before the page's own script
COLLECT = """<script>
const problems = [], problem = (...words) => problems.push(words.join(" "));
addEventListener("error", event => problem(event.message));
addEventListener("unhandledrejection", event => problem(event.reason));
console.error = console.warn = problem;
if (location.search) Object.defineProperty(navigator, "language", { value: "zh-CN" });
</script>"""

# after it: `read` says what the page shows. A frame sends this to the page around it, which goes
# through the actions
DRIVE = """<script>
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const text = (selector, from = document) =>
  all(selector, from).map(node => node.textContent).join(" ");
const wait = ms => new Promise(done => setTimeout(done, ms));
function box(node) {
  const { top, right, width, height } = node?.getBoundingClientRect() ?? {};
  return node && { top, right, width, height };
}

const numbers = (selector, name) =>
  document.querySelector(selector)?.getAttribute(name).match(/[\\d.]+/g).map(Number);
const heightOf = bar => bar && Number.parseFloat(bar.style.height);
const readBar = node => ({ kept: node.classList.contains("kept") });
const readCard = node => ({
  ...readBar(node), heights: ["bar", "ghost"].map(name => heightOf(node.querySelector("." + name))),
  label: node.ariaLabel, chosen: node.classList.contains("chosen"),
  shown: ["number", "answer", "value", "fate"].map(name => text("." + name, node)),
});
const readArrow = line =>
  line && ["x1", "y1", "x2", "y2"].map(name => Number(line.getAttribute(name)));
const readDevice = node => ({
  places: all(".places i", node).map(i => i.textContent),
  titles: all(".places i[title]", node).map(i => i.title.match(/\\d+/g).map(Number)),
  parts: all(".work i", node).map(i => Number(i.style.flexGrow)),
  time: text(".time span", node), busiest: !!node.querySelector(".busiest"),
});
const PAIRS = [["#pass", "#completions"], ["#draw", "#completions"], ["[name=G]", "#completions"],
               ["[name=reward]", "#completions"], ["[name=lengths]", "#arrows"],
               ["[name=lengths]", "#curve"], ["#sampling", "#rates"],
               ["[name=devices]", "#stages"], ["[name=B]", "#stages"]];
const PARAGRAPHS = ["summary", "no_signal", "advantage", "keep_count", "gradient", "cosine",
                    "ratio", "amdahl", "limit", "questions_per_step", "balance", "note"];
// all that is seen or heard, in one language
const said = () => [document.documentElement.lang, document.title, document.body.innerText,
                    ...all("main [aria-label], main [title]").map(n => n.ariaLabel ?? n.title),
].join("\\n");
const read = () => ({
  ...Object.fromEntries(PARAGRAPHS.map(id => [id, text("#" + id)])),
  checked: Object.fromEntries(
    all("[type=radio]").filter(r => r.checked).map(r => [r.name, r.value])),
  completions: all("#completions button").map(readCard),
  others: all("#others .other").map(
    o => ({ title: text("h3", o), bars: all(".strip > div", o).map(readBar) })),
  angle: text("#arrows text"),
  arrows: ["full", "own", "ghost"].map(
    name => readArrow(document.querySelector("#arrows line." + name))),
  curve: numbers("#curve polyline.own", "points"), axis: numbers("#curve .axis", "d"),
  split: { text: text("#split > span") },
  rates: all("#rates div").map(d => ({ text: text("span", d), now: !!d.className })),
  stages: all(".stage").map(
    s => ({ text: text("p", s), devices: all(".device", s).map(readDevice) })),
});

function act({ set, again, taps }) {
  for (const name in set) {
    const slider = document.getElementById(name);
    if (!slider) {
      all(`[name=${name}]`).find(r => r.value === String(set[name])).click();
      continue;
    }
    slider.value = set[name];
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  }
  if (again) document.getElementById("draw").click();
  for (const i of taps) all("#completions button")[i].click();
}

const inFrame = (hash, width = 390, height = 844) => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:${height}px;border:0`;
  addEventListener("message", event => { frame.remove(); done(event.data); }, { once: true });
  frame.src = location.href.split("#")[0] + hash;
  document.body.append(frame);
});

async function drive({ actions, hashes, sizes }) {
  const found = { first: read(), said: said(), dictionary: Object.values(CHINESE),
                  states: [], languages: [], hashes: [], frames: {} };
  for (const [n, action] of actions.entries()) {
    act(action);
    found.states.push(read());
    const speak = lang => { act({ set: { lang }, taps: [] }); return said(); };
    if (n % 5 === 4) found.languages.push(["zh", "en", "zh", "en"].map(speak));
    if (n % 20 !== 19) continue;
    await wait(300);  // the address is written a little later
    found.hashes.push([location.hash, said(), read().checked]);
  }
  found.controls = all("a, button, input, select, textarea, [tabindex]").map(node => ({
    tag: node.tagName, tabIndex: node.tabIndex,
    name: node.ariaLabel
      || [node, ...(node.labels ?? [])].map(named => named.textContent.trim()).join(""),
  }));
  const shared = found.hashes.map(([hash]) => hash);
  for (const hash of [...hashes, ...shared]) found.frames[hash] = await inFrame(hash);
  found.sizes = [];
  for (const hash of ["", "#lang=zh"])
    for (const [width, height] of sizes) found.sizes.push(await inFrame(hash, width, height));
  found.tries = [];
  for (const link of all(".try a")) {
    const before = location.hash;
    link.click();
    await wait(300);
    found.tries.push([before, link.hash, location.hash]);
  }
  location.hash = "#";
  await wait(100);
  found.ghosts = [read()];
  for (const set of [{ P: 0 }, { pass: 0.9 }, { pass: 0.8 }, { pass: 0.5 }]) {
    act({ set, taps: [] });
    found.ghosts.push(read());
  }
  act({ set: { lang: "zh" }, taps: [] });
  await wait(300);
  location.hash = "#";  // back to the first settings
  await wait(100);
  found.back = said();
  found.problems = problems;
  const pre = document.createElement("pre");
  pre.id = "found";
  pre.textContent = JSON.stringify(found);
  document.body.replaceChildren(pre);
}

addEventListener("load", async () => {
  if (window === top) return drive(PLAN);
  const name = node => node.outerHTML.slice(0, 100);
  const leaves = all("body *").filter(node => !node.children.length || node.matches("label"));
  const wide = n => getComputedStyle(n).display !== "inline" && n.scrollWidth > n.clientWidth + 1;
  const sent = {
    shown: read(), said: said(), problems,
    width: innerWidth, scrollWidth: document.documentElement.scrollWidth,
    beyond: all("body *").filter(node => box(node).right > innerWidth).map(name),
    cut: leaves.filter(wide).map(name),
  };
  await wait(300);
  sent.pairs = PAIRS.map(([control, effect]) => {
    const one = document.querySelector(control), pruning = document.getElementById("pruning");
    one.closest(".settings").scrollIntoView();
    const boxes = [pruning, one, document.querySelector(effect)].map(node => {
      const { top, bottom } = node.getBoundingClientRect();
      return [top, bottom];
    });
    return { name: control + " " + effect, boxes };
  });
  parent.postMessage({ ...sent, hash: location.hash }, "*");
});
</script>"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explorer")
    hashes = [*LARGE, *BROKEN, *TRIES, *IN_CHINESE, "#G=4&P=0.9375"]
    plan = json.dumps({"actions": ACTIONS, "hashes": hashes, "sizes": SIZES})
    page, drive = PAGE.read_text(), DRIVE.replace("PLAN", plan)
    page = page.replace("<head>", "<head>" + COLLECT).replace("</body>", drive + "</body>")
    (folder / "page.html").write_text(page)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900",
             "--dump-dom", "--virtual-time-budget=120000", f"--user-data-dir={folder}/profile"]
    command = [CHROMIUM, *flags, (folder / "page.html").as_uri()]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=180).stdout
    [dump] = re.findall(r'<pre id="found">(.*)</pre>', printed, re.DOTALL)
    return json.loads(html.unescape(dump))


# --- the made-up questions, written again: a link must always show the same completions ---


def numbers(seed):
    """mulberry32, in 32 bits."""
    bits = 2**32 - 1
    while True:
        seed = seed + 0x6D2B79F5 & bits
        t = (seed ^ seed >> 15) * (1 | seed) & bits
        t = t ^ (t + (t ^ t >> 7) * (61 | t) & bits)
        yield (t ^ t >> 14) / 2**32


@cache
def question(q, draw, G):
    """(number that decides about the reward, wrong answer, equal tokens, number that decides about
    the different ones) of each completion."""
    rng = numbers(1000 * draw + q)
    scale, group = 1 + 2 * next(rng), []
    for _ in range(G):
        u, wrong, tokens, _ = (next(rng) for _ in range(4))
        group.append((u, 1 + math.floor(5 * wrong), math.floor(scale * (20 + 40 * tokens)), tokens))
    return group


class Expected:
    """What the page must show in a state, by the project's functions."""

    def __init__(self, state):
        self.__dict__ |= {**FIRST, **state}
        self.p = self.__dict__["pass"]
        self.k = keep_count(self.G, self.P)
        self.n = questions_per_step(self.B, self.G, self.k)
        first, more = self.B * self.devices, self.n - self.B
        self.own = [[d * self.B + b + 1 for b in range(self.B)] for d in range(self.devices)]
        self.all = [
            own + [first + d * more + b + 1 for b in range(more)] for d, own in enumerate(self.own)
        ]

    def __repr__(self):
        return f"Expected({ {name: getattr(self, name) for name in FIRST} })"

    def right(self, q):
        drawn = [float(u < self.p) for u, _, _, _ in question(q, self.draw, self.G)]
        return [1 - r if q == 1 and i in self.flipped else r for i, r in enumerate(drawn)]

    def rewards(self, q):
        if self.reward == "binary":
            return self.right(q)
        rng = numbers(-1000 * self.draw - q)
        grades = [(2 if next(rng) < 0.7 else 1.5, next(rng) < 0.7) for _ in range(self.G)]
        return [r * value + form for r, (value, form) in zip(self.right(q), grades)]

    def answers(self, q):
        return [
            0 if r else wrong
            for r, (_, wrong, _, _) in zip(self.right(q), question(q, self.draw, self.G))
        ]

    def tokens(self, q):
        """With different lengths geometric ones, of mean 24 for the right and 6 for the wrong."""
        drawn = question(q, self.draw, self.G)
        if self.lengths == "equal":
            return [tokens for _, _, tokens, _ in drawn]
        going_on = [23 / 24 if r else 5 / 6 for r in self.right(q)]
        return [1 + math.floor(math.log(1 - u, p)) for (*_, u), p in zip(drawn, going_on)]

    def advantages(self, questions):
        return group_advantages(torch.tensor([self.rewards(q) for q in questions], dtype=F64))

    def kept(self, questions):
        """[(question, completion)] that one device keeps of its questions. Not for the rule
        `random`."""
        A = self.advantages(questions)
        if self.rule == "pooled":
            # questions with as many right ones have the same |A|; torch's std may round it in two
            # ways
            rows = prune_pooled(A.round(decimals=9), self.k * len(questions))
        elif self.rule == "distinct":
            rows = distinct(None, A, self.k)
        else:
            rows = batch_rows(prune(A, self.k), self.G)
        return [(questions[row // self.G], row % self.G) for row in rows.tolist()]

    def gradients(self, kept):
        """The gradient by question 1's logits, twice: of all completions of device 1, and of
        its kept ones."""
        questions, p = self.own[0], min(max(self.p, 0.01), 0.99)
        logits = torch.tensor([p] + 5 * [(1 - p) / 5], dtype=F64).log().repeat(self.B, 1)
        logits.requires_grad_()
        A = self.advantages(questions).flatten()
        answers = torch.tensor([self.answers(q) for q in questions])
        # by question, (B, 2): the probability to stop is a sigmoid, for wrong and for right ones
        stop = torch.tensor([1 / 6, 1 / 24], dtype=F64).logit().repeat(self.B, 1).requires_grad_()
        right = torch.tensor([self.right(q) for q in questions]).long()
        length = torch.tensor([self.tokens(q) for q in questions]).view(-1, 1)
        parameters = (logits, stop)
        if self.lengths == "equal":  # one token, and nothing to learn about its end
            length, parameters = torch.ones_like(length), (logits,)
        answer = logits.log_softmax(1).gather(1, answers).view(-1, 1)
        z = stop.gather(1, right).view(-1, 1)
        go_on = (-z).sigmoid().log()
        # (B·G, T): each token goes on, and the last one stops and is the answer
        t = torch.arange(1, length.max() + 1)
        mask, last = (t <= length).to(F64), t == length
        logp = torch.where(last, z.sigmoid().log() + answer, go_on)
        for rows in (slice(None), [(q - 1) * self.G + i for q, i in kept]):
            loss, _ = cppo_loss(logp[rows], logp[rows].detach(), A[rows], mask[rows], beta=0)
            parts = torch.autograd.grad(-loss, parameters, retain_graph=True)
            g = torch.cat([part[0] for part in parts])
            yield g * (g.norm() > 1e-12)  # so small a number is rounding


# --- comparing ---

NUMBER = re.compile(r"[−+]?\d+(?:\.\d+)?(?:e-\d+)?")


def same(text, expected):
    """The numbers in a text are the expected ones, each to half a unit of its last digit, and to
    what the loss rounds: its weights are float32."""
    shown = [word.replace("−", "-") for word in NUMBER.findall(text)]
    assert len(shown) == len(expected), (text, expected)
    for word, value in zip(shown, expected):
        mantissa, _, exponent = word.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        assert abs(float(word) - value) <= 0.5 * unit * (1 + 2e-3), (text, expected)


@pytest.fixture(scope="module")
def shown(found):
    """[(what is expected, what the page shows, what it keeps)] of the first view, of each state and
    of large ones.

    What it keeps: after pruning and after allocation, for each device [(question, completion)], as
    the boxes say.
    """
    views = [(FIRST, found["first"]), *zip(STATES, found["states"], strict=True)]
    views += [(state, found["frames"][hash]["shown"]) for hash, state in LARGE.items()]
    return [
        (Expected(state), view, [
            [[(q, i - 1) for q, i, _ in device["titles"]] for device in stage["devices"]]
            for stage in view["stages"][1:]
        ])
        for state, view in views
    ]  # fmt: skip


# --- 200 states ---


def test_k_different_completions_of_each_question_are_kept_and_they_are_those_of_the_rule(shown):
    for e, _, stages in shown:
        for questions_of, stage in zip((e.own, e.all), stages):
            for questions, kept in zip(questions_of, stage, strict=True):
                if e.rule == "random":
                    assert [q for q, _ in kept] == [q for q in questions for _ in range(e.k)]
                    assert kept == sorted(set(kept)) and all(0 <= i < e.G for _, i in kept)
                else:
                    assert kept == e.kept(questions)


def test_completions_advantages_and_who_is_kept(shown):
    for e, view, (pruned, _) in shown:
        questions, rewards, right = e.own[0], e.rewards(1), e.right(1)
        A = e.advantages(questions)
        kept = [i for q, i in pruned[0] if q == 1]
        for i, card in enumerate(view["completions"]):
            number, answer, value, fate = card["shown"]
            mark = f"{rewards[i]:g}" if e.reward == "graded" else "✗✓"[int(right[i])]
            assert (number, answer) == (str(i + 1), f"{'abcdef'[e.answers(1)[i]]} {mark}")
            assert (fate, card["kept"]) == (("kept", True) if i in kept else ("pruned", False))
            same(value, [A[0, i].item()])
            assert value.startswith("+") == (A[0, i] > 0)
            same(card["label"], [i + 1, rewards[i], A[0, i].item()])
            assert f"answer {answer[0]}" in card["label"] and fate in card["label"]
        same(view["summary"], [e.G, sum(right), len(kept), e.G - len(kept)])
        assert ("no signal" in view["no_signal"]) == bool(view["no_signal"]) == (not A[0].any())
        for q, row, other in zip(questions[1:], A[1:], view["others"], strict=True):
            kept = [(q, i) in pruned[0] for i in range(e.G)]
            same(other["title"], [q, sum(e.right(q)), e.G, sum(kept)])
            assert ("no signal" in other["title"]) == (not row.any())
            assert [bar["kept"] for bar in other["bars"]] == kept


def test_the_formula_of_an_advantage_of_k_and_of_the_questions_per_step(shown):
    for e, view, (pruned, _) in shown:
        i = e.chosen - 1 if e.chosen else next((i for q, i in pruned[0] if q == 1), 0)
        r = torch.tensor(e.rewards(1), dtype=F64)
        same(view["advantage"], [i + 1, r[i], r.mean(), r.std(), 1e-4, e.advantages([1])[0, i]])
        assert [card["chosen"] for card in view["completions"]] == [j == i for j in range(e.G)]
        same(view["keep_count"], [1, e.G, 1, e.P, e.k])
        same(view["questions_per_step"], [e.B, e.G, e.k, e.n])


def test_direction_and_length_of_the_gradient(shown):
    for e, view, (pruned, _) in shown:
        g, h = e.gradients(pruned[0])
        nothing = not g.any() or not h.any()
        same(view["gradient"], [1, 1, e.B * e.G, len(pruned[0])] + [0] * nothing)
        if nothing:
            assert view["cosine"] == view["ratio"] == ""
            continue
        cosine, ratio = min(1, (g @ h / g.norm() / h.norm()).item()), (h.norm() / g.norm()).item()
        same(view["cosine"], [g @ h, g.norm(), h.norm(), cosine])
        same(view["ratio"], [h.norm(), g.norm(), ratio])
        same(view["angle"], [e.G, 1, math.degrees(math.acos(cosine)), ratio])
        # the arrows: y goes down on a screen
        full, kept = (complex(x2 - x1, y1 - y2) for x1, y1, x2, y2 in view["arrows"][:2])
        expected = ratio * complex(cosine, math.sqrt(1 - cosine**2))
        assert kept / full == pytest.approx(expected, abs=1e-6 * max(1, ratio))


def test_the_cosine_at_each_pruning_rate(shown):
    for e, view, _ in shown[::5]:
        if e.rule == "random" or "axis" not in view:
            continue
        _, one, _, _, zero, _ = view["axis"]  # the heights of the cosines 1 and 0
        expected = []
        for k in range(1, e.G + 1):
            at = Expected({name: getattr(e, name) for name in FIRST} | {"P": 1 - k / e.G})
            g, h = at.gradients(at.kept(e.own[0]))
            if h.any():
                cosine = (g @ h / g.norm() / h.norm()).item()
                expected += [30 + 350 * (1 - k / e.G), one + (1 - cosine) * (zero - one)]
        assert view["curve"] == pytest.approx(expected, abs=1e-3)  # of 90 pixels


def test_what_pruning_alone_can_save(shown):
    for e, view, (pruned, _) in shown:
        s, kept, sampled = e.sampling, sum(map(len, pruned)), e.devices * e.B * e.G
        phases = {"total": 1, "logprobs": 0, "update": 1 - s}
        same(view["amdahl"], [1, 1, 1, s, 1 - s, kept, sampled, amdahl(phases, kept / sampled)])
        same(view["limit"], [1, 1 / s] if s else [])
        after = [s, (1 - s) * kept / sampled]
        same(view["split"]["text"], [1, sum(after)])
        rates = [P for P in RATES if e.G * (1 - P) >= 1]
        speeds = [amdahl(phases, keep_count(e.G, P) / e.G) for P in rates]
        for rate, P, speed in zip(view["rates"], rates, speeds, strict=True):
            same(rate["text"], [speed, P])
            assert rate["now"] == (P == e.P)


def test_places_and_times_of_the_devices(shown):
    for e, view, (pruned, allocated) in shown:
        sampled = [[(q, i) for q in questions for i in range(e.G)] for questions in e.own]
        for completions, B, stage in zip(
            (sampled, pruned, allocated), (e.B, e.B, e.n), view["stages"], strict=True
        ):
            lengths = [[e.tokens(q)[i] for q, i in kept] for kept in completions]
            own = [step_time([sum(tokens)], **COST) for tokens in lengths]
            step = step_time([sum(tokens) for tokens in lengths], **COST)
            same(stage["text"], [step, B * e.devices, step / (B * e.devices)])
            for kept, tokens, seconds, device in zip(
                completions, lengths, own, stage["devices"], strict=True
            ):
                empty = [""] * (e.B * e.G - len(kept))
                assert device["places"] == [str(q) for q, _ in kept] + empty
                assert device["titles"] == [[q, i + 1, n] for (q, i), n in zip(kept, tokens)]
                assert device["parts"] == [200, *tokens]
                same(device["time"], [seconds])
                assert device["busiest"] == (seconds == step)
        tokens = [n for row in lengths for n in row]  # after allocation
        shares = [sum(tokens[i] for i in share) for share in balance(tokens, e.devices)]
        shared = step_time(shares, **COST)
        same(view["balance"], [shared, step] if e.devices > 1 else [])
        assert bool(view["note"]) == (e.rule in ("distinct", "pooled"))


# --- addresses ---


@pytest.mark.parametrize("hash", BROKEN)
def test_a_broken_address_shows_the_first_settings(found, hash):
    frame = found["frames"][hash]
    assert frame["said"] == found["said"] and frame["shown"]["checked"] == found["first"]["checked"]


def test_an_address_shows_the_same_again(found):
    assert len(found["hashes"]) == 10
    for hash, *seen in found["hashes"]:
        frame = found["frames"][hash]
        assert [frame["hash"], frame["said"], frame["shown"]["checked"]] == [hash, *seen]


def test_a_link_to_try_changes_what_it_names_and_leaves_the_rest(found):
    assert [link for _, link, _ in found["tries"]] == TRIES
    for before, link, after in found["tries"]:
        before, after, named = (
            dict(parse_qsl(hash[1:], keep_blank_values=True)) for hash in (before, after, link)
        )
        expected = before | named
        assert after == {name: word for name, word in expected.items() if word}


# --- the ghost: the state before the last change ---


def test_the_ghost_of_the_arrow_is_the_pruned_gradient_before(found):
    first, then, *_ = found["ghosts"]
    before, now = (
        [complex(x2 - x1, y2 - y1) for x1, y1, x2, y2 in view["arrows"]] for view in (first, then)
    )
    assert now[2] / now[0] == pytest.approx(before[1] / before[0])
    assert now[1] == pytest.approx(now[0])  # P = 0


def test_the_ghost_of_a_slider_is_from_before_it_was_moved(found):
    first, _, _, _, last = found["ghosts"]
    assert sum(ghost is not None for _, ghost in (c["heights"] for c in last["completions"])) > 8
    for was, card in zip(first["completions"], last["completions"], strict=True):
        old, new = (float(view["shown"][2].replace("−", "-")) for view in (was, card))
        bar, ghost = card["heights"]
        assert (ghost is None) == (old == new)
        assert ghost is None or ghost / bar == pytest.approx(abs(old / new), rel=0.02)


# --- Chinese ---


def test_chinese_says_the_same_numbers_and_no_english_word(found):
    texts = [found["back"], *(found["frames"][address]["said"] for address in IN_CHINESE)]
    for chinese, english, *again in found["languages"]:
        assert again == [chinese, english] and english.startswith("en\n")
        assert set(re.findall("[一-鿿]+", english)) == {"中文"}
        assert sorted(NUMBER.findall(chinese)) == sorted(NUMBER.findall(english))
        texts.append(chinese)
    for text in texts:
        assert text.startswith("zh\n") and set(re.findall("[A-Za-z]{2,}", text)) <= NAMES
    for entry in found["dictionary"]:
        for part in re.split(r"\{\d\}|<.*?>|&nbsp;", entry):
            assert any(part in text for text in texts), entry


# --- the page itself ---


def test_the_page_loads_nothing_and_names_no_other_address():
    page = PAGE.read_text()
    loads = r"https?:|\bsrc\s*=|@import|url\((?!#)|\bfetch\(|\bimport\b|XMLHttpRequest"
    assert not re.search(loads, page)
    links = set(re.findall(r'href="([^"]*)"', page.replace("&amp;", "&")))
    assert links == {"data:,", "#", "live.html", *TRIES}


def test_no_javascript_error_and_nothing_is_cut_off_at_390_pixels(found):
    assert found["problems"] == [] and len(found["frames"]) >= len(LARGE) + len(BROKEN)
    for hash, frame in found["frames"].items():
        assert frame["width"] == 390 and frame["scrollWidth"] <= 390, hash
        assert not frame["beyond"] and not frame["cut"] and not frame["problems"], hash


def test_a_control_and_what_it_changes_are_in_the_window_together(found):
    """Neither lies under the bar with the pruning rate, which stays in the window itself."""
    for (_, height), frame in zip(SIZES * 2, found["sizes"], strict=True):
        for pair in frame["pairs"]:
            (bar_top, bar_bottom), control, effect = pair["boxes"]
            assert bar_top >= 0, (height, pair)
            for top, bottom in (control, effect):
                assert bar_bottom <= top < bottom <= height, (height, pair)


def test_every_control_is_reached_by_keyboard_and_has_a_name(found):
    assert len(found["controls"]) > 30
    assert all(control["tabIndex"] >= 0 and control["name"] for control in found["controls"])
