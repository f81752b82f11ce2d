"""docs/live.html: it is what docs/live/build.py makes, and in Chromium it learns, from file://.

The functions that train are tested elsewhere. Here a reader presses the page's buttons.
"""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from cppo import prune
from grpo import group_advantages
from tests.browser import CHROMIUM, Browser

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "live.html"
SOURCES = ROOT / "docs" / "live"


# --- the file ---


def test_the_page_is_what_its_parts_make():
    made = runpy.run_path(str(SOURCES / "build.py"))["page"]()
    assert PAGE.read_text() == made, "stale: python docs/live/build.py"


def test_the_page_loads_nothing():
    page = PAGE.read_text()
    loads = r"https?:|\bsrc\s*=|@import|url\(|\bfetch\(|\bimport\b|importScripts|XMLHttpRequest"
    assert not re.search(loads, page)


# --- the words ---

CHINESE = json.loads((SOURCES / "chinese.json").read_text())


def spoken_by_code():
    """The templates of say`…` with {0}, {1}, …, as words.js makes them."""
    code = "".join((SOURCES / name).read_text() for name in ("drawing.js", "page.js"))
    for template in re.findall(r"say`((?:[^`$]|\$\{(?:[^{}`]|\{[^{}]*\})*\})*)`", code):
        parts = re.split(r"\$\{(?:[^{}`]|\{[^{}]*\})*\}", template)
        yield "".join(part + f"{{{i}}}" for i, part in enumerate(parts[:-1])) + parts[-1]


def test_each_sentence_of_the_code_has_a_chinese_one_with_the_same_values():
    found = list(spoken_by_code())
    assert len(found) > 20 and set(found) <= set(CHINESE)
    for english, chinese in CHINESE.items():
        values = re.compile(r"\{\d\}")
        assert sorted(values.findall(english)) == sorted(values.findall(chinese)), english


# --- in the browser ---


@pytest.fixture(scope="module")
def opened():
    """open(settings, width, height) → the page in Chromium."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here to open the page")
    with Browser() as browser:

        def opened(settings, width=1280, height=900):
            page = browser.open(f"{PAGE}#{settings}", width, height)
            page.wait("window.live", 20)
            return page

        yield opened


SMALL = "lang=en&group_size=4&pruning_rate1=0.5&questions_per_step1=2"
STEPS = "live.map(state => state.step)"


def wait_for_steps(page, number, seconds=20):
    page.wait(f"{STEPS}.every(step => step >= {number})", seconds)


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})]"
                    ".filter(node => getComputedStyle(node).visibility === 'visible')"
                    ".map(node => node.innerText)")


@pytest.mark.slow
def test_both_models_learn_pause_go_on_and_start_anew(opened):
    page = opened("lang=en&questions_per_step1=4")
    assert [state["method"] for state in page.run("live")] == ["grpo", "cppo"]
    page.wait("!document.querySelector('#questions').innerText.includes('…')", 10)
    before = texts(page, "#questions code")
    page.click("#run")
    wait_for_steps(page, 20, seconds=150)
    page.click("#run")  # pause
    page.wait("run.textContent === 'Go on'", 5)
    page.run("new Promise(done => setTimeout(done, 3000))")  # the step that was begun
    grpo, cppo = states = page.run("live")
    page.run("new Promise(done => setTimeout(done, 1500))")
    assert page.run("live") == states
    assert grpo["completions"] == 16 * grpo["step"] and cppo["completions"] == 64 * cppo["step"]
    assert grpo["seconds"] > 1 and cppo["seconds"] > 1
    # the base model has 0.40, and thinks in 30 % of its completions
    assert cppo["accuracy"] > 0.55 and cppo["length"] > 18
    assert texts(page, "#accuracy b") == [f"{state['accuracy']:.2f}" for state in states]
    assert texts(page, "#questions code")[2::3] != before[2::3]  # CPPO's answers
    page.click("#run")
    page.wait(f"{STEPS}.every((step, i) => step > {[grpo['step'], cppo['step']]}[i])", 20)
    page.run("window.old = lanes")
    page.click("#anew")
    assert page.run(STEPS) == [0, 0] and texts(page, "#run") == ["Start"]
    trained = page.run("old.map(lane => lane.points.length)")
    page.run("new Promise(done => setTimeout(done, 1500))")
    assert page.run(STEPS) == [0, 0]
    assert page.run("old.map(lane => lane.points.length)") == trained  # the workers have ended
    assert page.problems() == []


@pytest.mark.slow
def test_one_step_at_a_time_shows_the_numbers_of_the_step(opened):
    page = opened(SMALL)
    for step in (1, 2):
        page.click("#one")
        wait_for_steps(page, step)
        page.run("new Promise(done => setTimeout(done, 500))")  # until it is drawn
        assert texts(page, "#lane1 tbody .from2") == [] and len(texts(page, "#lane1 tbody tr")) == 4
        for stage in range(2, 7):
            page.click("#one")
            seen = [bool(texts(page, f"#lane1 .from{part}")) for part in range(2, 7)]
            assert seen == [part <= stage for part in range(2, 7)]
    assert page.run(STEPS) == [2, 2] and page.problems() == []
    for lane, kept in (("0", 4), ("1", 2)):
        rewards = [float(text) for text in texts(page, f"#lane{lane} tbody .from2")]
        shown = [text.replace("−", "-") for text in texts(page, f"#lane{lane} .value")]
        advantages = group_advantages(torch.tensor([rewards]))
        assert [float(text) for text in shown] == pytest.approx(advantages[0].tolist(), abs=0.0051)
        fates = texts(page, f"#lane{lane} tbody .from4")
        rows = prune(advantages, kept)[0].tolist()
        assert len(texts(page, f"#lane{lane} tr.kept")) == kept
        assert fates == ["kept" if i in rows else "pruned" for i in range(4)]


@pytest.mark.slow
def test_a_reward_of_the_reader(opened):
    page = opened(SMALL)

    def write(expression):
        page.run(f"expression.value = {json.dumps(expression)};"
                 "expression.dispatchEvent(new Event('change', {bubbles: true}))")

    for expression, sentence in [
        ("1 +", "The reward fails: Unexpected token ')'"),
        ("completion.length / 0", "The reward must be a finite number, not Infinity."),
    ]:
        write(expression)
        page.click("#run")
        page.wait("problem.textContent", 10)
        assert texts(page, "#problem") == [sentence]
        page.wait("run.textContent === 'Start'", 5)
    page.click("[name=lang][value=zh]")
    assert texts(page, "#problem") == ["奖励必须是有限的数，不能是 Infinity。"]
    write("completion.length")
    assert page.run("form.elements.reward.value") == "own" and page.run("problem.textContent") == ""
    page.click("#one")
    wait_for_steps(page, 1)
    page.run("new Promise(done => setTimeout(done, 500))")
    rows = page.run("lanes[1].result.groups[0].completions.map(c => [c.text.length, c.reward])")
    assert len(rows) == 4 and all(length == reward for length, reward in rows)
    assert page.problems() == []


LATIN = {
    "en", "zh", "English", "GRPO", "CPPO", "Dr", "JavaScript", "KL", "token", "think", "answer",
    "completion", "question", "right", "answer_right",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("width, height", [(1280, 900), (390, 844)])
def test_both_languages_fit_into_the_window(opened, width, height):
    page = opened(SMALL, width, height)
    page.click("#one")
    wait_for_steps(page, 1)
    page.run("new Promise(done => setTimeout(done, 500))")
    for lang in ("en", "zh"):
        page.click(f"[name=lang][value={lang}]")
        for stage in range(1, 7):
            page.click(f"[data-stage='{stage}']")
            text = page.run("document.title + document.body.innerText + expression.value")
            latin = set(re.findall(r"[A-Za-z_]{2,}", text))
            chinese = set(re.findall("[一-鿿]+", text))
            assert chinese == {"中文"} if lang == "en" else latin <= LATIN, latin - LATIN
        assert page.run("innerWidth") == width
        assert page.run("document.documentElement.scrollWidth") <= width
    names = page.run("[...document.querySelectorAll('a, button, input, select')].map(node => "
                     "[node, ...node.labels ?? []].map(named => named.innerText).join(''))")
    assert len(names) > 30 and all(names)
    assert page.problems() == []


ADDRESSES = {
    "group_size=4&pruning_rate1=0.9375&method0=random&pruning_rate0=0.5":
        {"group_size": "4", "pruning_rate1": "0.75", "pruning_rate0": "0.5"},
    "group_size=32&questions_per_step1=16": {"group_size": "32", "questions_per_step1": "8"},
    "method0=grpo&pruning_rate0=0.5&lr0=7&beta=&seed=x&length=1&elements=2":
        {"pruning_rate0": "0", "lr0": "0.0001", "beta": "0.04", "seed": "1"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_gives_settings_that_fit_together(opened, address):
    page = opened(address)
    for name, value in ADDRESSES[address].items():
        assert page.run(f"form.elements.{name}.value") == value
        assert f"{name}={value}" in page.run("location.hash")
    assert page.problems() == []
