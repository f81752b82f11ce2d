"""docs/live.html and docs/you.html are what docs/live/build.py makes. In Chromium live.html learns,
from file://.

The functions that train are tested elsewhere. Here a reader presses the page's buttons.
"""

import re
import runpy

import pytest

from tests.helpers.runs import ROOT

PAGE = ROOT / "docs" / "live.html"
SOURCES = ROOT / "docs" / "live"


@pytest.mark.parametrize("name", ["live", "you"])
def test_a_page_is_what_its_parts_make_and_loads_nothing(name):
    made = runpy.run_path(str(SOURCES / "build.py"))["page"](name)
    page = PAGE.with_stem(name).read_text()
    assert page == made, "stale: python docs/live/build.py"
    loads = (r"https?:|\bsrc\s*=|@import|url\((?!#)|\bfetch\(|\bimport\b|importScripts|"
             "XMLHttpRequest")
    assert not re.search(loads, page)


# --- what a reader does ---

STEPS = "lanes.map(lane => lane.points.at(-1)?.step ?? 0)"


def wait_for_steps(page, number):
    page.wait(f"{STEPS}.every(step => step >= {number})", 60)
    page.run("new Promise(done => setTimeout(done, 1000))")  # it draws


@pytest.mark.slow
def test_a_reader_sees_one_step_then_both_models_learn_by_a_reward_of_the_reader(browser):
    settings = "lang=en&group_size=4&pruning_rate1=0.5&questions_per_step1=2"
    page = browser.open(f"{PAGE}#{settings}", 1280, 900)
    page.wait("lanes.length", 20)
    change = "expression.dispatchEvent(new Event('change', {bubbles: true}))"
    page.run(f"expression.value = 'completion.'; {change}")  # it is broken: there is no start
    page.wait("run.disabled && one.disabled", 20)
    page.run("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: ' ', bubbles: true}))")
    assert page.run("running") is False
    page.run(f"expression.value = 'completion.length'; {change}")
    for _ in range(6):  # the parts of one step
        page.click("#one")
        wait_for_steps(page, 1)
    assert page.run(STEPS) == [1, 1]
    rows = page.run("lanes[1].result.groups[0].completions.map(c => [c.text.length, c.reward])")
    assert len(rows) == 4 and all(length == reward for length, reward in rows)

    page.click("#run")
    wait_for_steps(page, 3)
    page.click("#run")  # pause
    page.run("new Promise(done => setTimeout(done, 2000))")  # the step that was begun
    accuracies = page.run("lanes.map(lane => lane.points.at(-1).accuracy)")
    shown = page.run("[...document.querySelectorAll('#accuracy b')].map(node => node.innerText)")
    assert shown == [f"{accuracy:.2f}" for accuracy in accuracies]
    above = "$('story').getBoundingClientRect().bottom <= accuracy.getBoundingClientRect().top"
    assert page.run(above)  # the sentence with the result
    page.click("#anew")
    assert page.run(STEPS) == [0, 0]
