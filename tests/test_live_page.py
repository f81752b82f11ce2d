"""docs/live.html and docs/you.html are what docs/live/build.py makes. In Chromium live.html learns,
from file://.

The functions that train are tested elsewhere. Here a reader presses the page's buttons.
"""

import json
import re
import runpy
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest

from docs.speedups import seconds_to_goal
from tests.live import needs_node, run_js, weights_in_base64

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "live.html"
SOURCES = ROOT / "docs" / "live"


# --- the file ---


@pytest.mark.parametrize("name", ["live", "you"])
def test_a_page_is_what_its_parts_make_and_loads_nothing(name):
    made = runpy.run_path(str(SOURCES / "build.py"))["page"](name)
    page = PAGE.with_stem(name).read_text()
    assert page == made, "stale: python docs/live/build.py"
    loads = (r"https?:|\bsrc\s*=|@import|url\((?!#)|\bfetch\(|\bimport\b|importScripts|"
             "XMLHttpRequest")
    assert not re.search(loads, page)


# --- the words ---

CODE = {"live": ("drawing.js", "page.js"), "you": ("page.js",)}


def spoken_by_code(name):
    """The templates of say`…` with {0}, {1}, …, as words.js makes them."""
    code = "".join((SOURCES.with_name(name) / file).read_text() for file in CODE[name])
    for template in re.findall(r"say`((?:[^`$]|\$\{(?:[^{}`]|\{[^{}]*\})*\})*)`", code):
        parts = re.split(r"\$\{(?:[^{}`]|\{[^{}]*\})*\}", template)
        key = "".join(part + f"{{{i}}}" for i, part in enumerate(parts[:-1])) + parts[-1]
        yield " ".join(key.split())


@pytest.mark.parametrize("name", CODE)
def test_each_sentence_of_the_code_has_a_chinese_one_with_the_same_values(name):
    of_page = json.loads((SOURCES.with_name(name) / "chinese.json").read_text())
    found = list(spoken_by_code(name))
    assert len(found) > 20 and set(found) <= set(of_page)
    for english, chinese in of_page.items():
        values = re.compile(r"\{\d\}")
        assert sorted(values.findall(english)) == sorted(values.findall(chinese)), english


# --- in the browser ---


@pytest.fixture
def opened(browser):
    """open(settings, width, height) → the page in Chromium."""
    def opened(settings, width=1280, height=900):
        page = browser.open(f"{PAGE}#{settings}", width, height)
        page.wait("window.live", 20)
        return page

    return opened


SMALL = "lang=en&group_size=4&pruning_rate1=0.5&questions_per_step1=2"
STEPS = "live.map(state => state.step)"


def wait_for_steps(page, number, seconds=20):
    page.wait(f"{STEPS}.every(step => step >= {number})", seconds)


def rest(page, seconds):
    page.run(f"new Promise(done => setTimeout(done, {1000 * seconds}))")


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})]"
                    ".filter(node => getComputedStyle(node).visibility === 'visible')"
                    ".map(node => node.innerText)")


def press(page, key):
    text = {"text": " "} if key == " " else {}
    page.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
    page.ask("Input.dispatchKeyEvent", type="keyUp", key=key)


@pytest.mark.slow
def test_both_models_learn_pause_go_on_and_start_anew(opened):
    page = opened("lang=en&questions_per_step1=4")
    page.wait("!document.querySelector('#questions').innerText.includes('…')", 10)
    before = texts(page, "#questions code")
    page.click("#run")
    wait_for_steps(page, 20, seconds=150)
    page.click("#run")  # pause
    page.wait("run.textContent === 'Go on'", 5)
    rest(page, 3)  # the step that was begun
    grpo, cppo = states = page.run("live")
    rest(page, 1.5)
    assert page.run("live") == states
    assert (grpo["method"], cppo["method"]) == ("grpo", "cppo")
    assert grpo["seconds"] > 1 and cppo["seconds"] > 1
    # the base model has 0.40, and thinks in 30 % of its completions
    assert cppo["accuracy"] > 0.55 and cppo["length"] > 18
    assert texts(page, "#accuracy b") == [f"{state['accuracy']:.2f}" for state in states]
    assert texts(page, "#questions code")[2::3] != before[2::3]  # CPPO's answers
    page.click("#run")
    page.wait(f"{STEPS}.every((step, i) => step > {[grpo['step'], cppo['step']]}[i])", 20)
    page.run("window.old = lanes")
    page.click("#anew")
    assert texts(page, "#run") == ["Start"]
    trained = page.run("old.map(lane => lane.points.length)")
    rest(page, 1.5)
    assert page.run(STEPS) == [0, 0]
    assert page.run("old.map(lane => lane.points.length)") == trained  # the workers have ended


# --- one step at a time ---


# [what a stage explains: the stage, its text, and its cells and formulas that are seen]
EXPLAINED = """(stage => [`#stages [data-stage="${stage}"]`, "#stage_text",
    stage === 1 ? "article code" : `article .from${stage}`].map(selector =>
  [...document.querySelectorAll(selector)].filter(node => node.innerText && node.offsetParent)
    .map(node => node.getBoundingClientRect()).map(({ top, bottom, left, right }) =>
      top >= drive.getBoundingClientRect().bottom && bottom <= innerHeight
      && left >= 0 && right <= innerWidth)))"""
# [completion, × how many, reward, A, kept or pruned] of each row of a lane
ROWS = """(lane => [...document.querySelectorAll(`#lane${lane} tbody tr`)].map(row =>
  [...row.querySelectorAll("code, .times, .from2, .value, .from4")].map(node => node.textContent)
))"""
LATIN = {
    "en", "zh", "English", "GRPO", "CPPO", "Dr", "JavaScript", "KL", "token", "think", "answer",
    "completion", "question", "right", "answer_right", "nano", "py", "notebook",
}  # fmt: skip


def check_the_numbers(page, lane):
    """The rows show each completion of the step. Equal completions of one fate are one row."""
    shown = Counter()
    rows = page.run(f"{ROWS}({lane})")
    for text, times, *numbers in rows:
        shown[text, *numbers] += int(times[2:] or 1)
    assert len(shown) == len(rows)
    right = Counter()
    for c in page.run(f"lanes[{lane}].result.groups[0].completions"):
        A = f"{c['advantage']:+.2f}".replace("-", "−").replace("+0.00", "0.00")
        fate = "kept" if c["kept"] else "pruned"
        right[c["text"].replace("\n", " "), str(c["reward"]), A, fate] += 1
    assert shown == right


def check_the_lanes(page, width):
    """On a large screen the rows of both lanes align; on a phone one lane is seen."""
    tops = [page.run(f"[...document.querySelectorAll('#lane{lane} tr')].map(row =>"
                     " row.getBoundingClientRect().top)") for lane in (0, 1)]
    if width > 600:
        assert len(tops[0]) > 2 and all(a == b for a, b in zip(*tops))
    else:
        assert texts(page, "#other") == ["Show GRPO"] and sum(map(any, tops)) == 1
        page.click("#other")
        assert texts(page, "#other") == ["Show CPPO"]
        assert page.run("document.documentElement.scrollHeight") <= 3700


def check_the_languages(page, width):
    sizes = "[...document.querySelectorAll('.tag')].map(tag => getComputedStyle(tag).fontSize)"
    assert set(page.run(sizes)) == {"10px"}
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


@pytest.mark.slow
@pytest.mark.parametrize("width, height", [(1280, 900), (390, 844)])
def test_one_step_at_a_time_each_stage_lies_in_the_window(opened, width, height):
    page = opened("lang=en", width, height)
    for stage in range(1, 7):
        press(page, "ArrowRight")
        wait_for_steps(page, 1)
        rest(page, 0.5)
        seen = [bool(texts(page, f"#lane1 .from{part}")) for part in range(2, 7)]
        assert seen == [part <= stage for part in range(2, 7)]
        button, text, parts = page.run(f"{EXPLAINED}({stage})")
        assert button and text and len(parts) >= (1 if width < 600 else 2)
        assert all(button + text + parts), stage
        below = page.run("document.querySelector('.box').getBoundingClientRect().top"
                         " - drive.getBoundingClientRect().bottom")
        assert abs(below) < 10  # the box is right below the buttons
        if stage < 4:  # equal completions are one row, from stage 4 on one for each fate
            completions = [text for text, *_ in page.run(f"{ROWS}(1)")]
            assert len(set(completions)) == len(completions)
    for lane in (0, 1):
        check_the_numbers(page, lane)
    check_the_lanes(page, width)
    check_the_languages(page, width)
    names = page.run("[...document.querySelectorAll('a, button, input, select')].map(node => "
                     "[node, ...node.labels ?? []].map(named => named.innerText).join(''))")
    assert len(names) > 30 and all(names)
    press(page, "ArrowRight")
    wait_for_steps(page, 2)
    rest(page, 0.5)
    assert page.run(STEPS) == [2, 2] and texts(page, "#lane1 tbody .from2") == []


TWO_GROUPS = """(() => {
  const [group] = lanes[1].result.groups;
  const rewarded = (question, rewards, A) => {
    const own = (reward, i) => ({ reward, advantage: A * (2 * reward - 1), kept: i < 2 });
    const completions = rewards.map((r, i) => ({ ...group.completions[i], ...own(r, i) }));
    return { question, answer: "1", completions };
  };
  const rewards = [[1, 1, 1, 1], [0, 1, 1, 0]];
  lanes[1].result.groups = [rewarded("equal", rewards[0], 0), rewarded("half", rewards[1], 0.87)];
  stage = 0;
  draw();
})()"""


@pytest.mark.slow
def test_a_question_whose_rewards_differ_is_shown_first_and_equal_ones_are_explained(opened):
    page = opened(SMALL)
    page.click("#one")
    wait_for_steps(page, 1)
    rest(page, 0.5)
    page.run(TWO_GROUPS)
    assert texts(page, "#lane1 .asked b") == ["half"]
    assert "Of equal |A| the first ones are kept." in texts(page, "#lane1 .formulas")[0]
    page.click("#next1")
    assert texts(page, "#lane1 .asked b") == ["equal"]
    assert "All rewards are equal, so every A is 0." in texts(page, "#lane1 .formulas")[0]


# --- what decides the race, and how it is told ---


def follow(page, address):
    page.run(f"location.hash = {json.dumps(address)}")
    rest(page, 0.5)


@pytest.mark.slow
def test_the_page_says_in_what_the_models_differ(opened):
    page = opened("lang=en")
    lines = texts(page, "#rivals div")
    assert lines == ["GRPO\n1 question a step, trains on 16 of 16, rate 0.0001",
                     "CPPO\n8 questions a step, trains on 2 of 16, rate 0.0003 "
                     "(it averages 8 questions, so it can take larger steps)"]
    page.click("#same")
    assert page.run("lanes.map(lane => lane.settings.lr)") == [0.0001, 0.0001]
    page.click("#same")
    assert page.run("lanes.map(lane => lane.settings.lr)") == [0.0001, 0.0003]
    colors = """['lane0', 'lane1'].map(name =>
      getComputedStyle(document.querySelector(`#rivals .${name}`)).borderTopColor)"""
    assert page.run(colors) == ["rgb(132, 142, 154)", "rgb(29, 79, 143)"]
    both = "method0=cppo&pruning_rate0=0.875&questions_per_step0=8&lr0=0.0003&method1=cppo&lang=en"
    for change, names in [("pruning_rate1=0.5", ["CPPO, P = 0.875", "CPPO, P = 0.5"]),
                          ("lr1=0.001", ["CPPO, rate 0.0003", "CPPO, rate 0.001"]),
                          ("seed=2", ["CPPO 1", "CPPO 2"])]:
        follow(page, f"{both}&{change}")
        assert texts(page, "#rivals h3") == names
        first, second = page.run(colors)
        same = change != "pruning_rate1=0.5"  # a smaller P is paler; else dashes
        assert (first == second) == same == page.run("document.body.classList.contains('dashes')")


EARLIER = json.loads((SOURCES / "earlier.json").read_text())


@needs_node
def test_the_earlier_run_begins_as_a_run_of_today():
    begun = run_js("""return given.settings.map(settings => {
      const { accuracy, length, thinks } = make_lane(bytes, settings, answer_right).step();
      return [accuracy, length, thinks];
    });""", base64=weights_in_base64(), settings=[lane["settings"] for lane in EARLIER])
    recorded = [lane["steps"][0][1:] for lane in EARLIER]
    # if not: node experiments/live.js record
    assert sum(begun, []) == pytest.approx(sum(recorded, []), abs=6e-4)


def test_the_earlier_run_is_told_in_the_order_in_which_things_became_true(opened):
    files = (ROOT / "experiments" / "live.js", SOURCES / "page.js")
    asked, shown = (re.findall(r'"(\d[-+\d]+=\?)"', file.read_text()) for file in files)
    assert asked == shown
    page = opened("film&lang=en", 900, 420)
    told = page.run("""[...Array(Math.floor(film.seconds * 10)).keys()].map(tenth => {
      film(tenth / 10);
      return $("story").textContent;
    }).filter((text, i, all) => text && text !== all[i - 1])""")
    grpo, cppo = (lane["steps"] for lane in EARLIER)
    slow, fast = map(seconds_to_goal, EARLIER)
    many = 16 * sum(seconds <= slow for seconds, *_ in grpo)  # completions: 16 in a step, and 128
    more = 128 * sum(seconds <= fast for seconds, *_ in cppo)
    behind = mean([accuracy for seconds, accuracy, *_ in grpo if seconds <= fast][-32:])
    assert [text for text in told if text[:8] != "Both now"] == [
        "Both mostly guess.", "The completions get longer. Nobody asked for that.",
        "CPPO now thinks in most completions, because thinking pays.",
        f"After {fast:.0f} s CPPO is right 85 times in 100; GRPO is at {behind:.2f}.",
        f"By the clock CPPO was first ({fast:.0f} s, GRPO {slow:.0f} s), "
        f"by the completions GRPO ({many:,}, CPPO {more:,}).",
    ]
    assert page.run("document.documentElement.scrollHeight") <= 420


def test_the_figures_that_the_page_quotes_are_measured():
    page, results = (SOURCES / "page.html").read_text(), ROOT / "experiments" / "results"
    start, later = (
        [measured[f"1/|o|: k = 2: {name}"]["mean"] for name in ("cosine", "norm of the sum")]
        for measured in json.loads((results / "claims.json").read_text())["advantage"])
    assert f"gradients is {later[0]:.2f})" in page and f"half ({start[0]:.2f})" in page
    # a mean over 2 of 16 completions counts each of them 8 times as much
    assert f"point {8 * later[1]:.1f} and {8 * start[1]:.1f} times as far" in page
    assert "GRPO takes 24.3 s to the dotted line, CPPO 23.8 s" in page
    assert "23.8 and 24.3 s on average" in (results / "browser.md").read_text()


def test_before_the_start_the_page_shows_the_earlier_run_of_these_settings(opened):
    curves = "document.querySelectorAll('polyline').length"
    page = opened("lang=en")
    assert page.run(curves) == 4 and "earlier run" in texts(page, "#story")[0]
    assert "85 of 100 right" in page.run("$('accuracy').textContent")
    phases = EARLIER[0]["phases"]
    most = sum(phases.values()) / phases["sampling"]  # Amdahl's law
    assert f"at most {most:.1f} times" in texts(page, "#bound")[0]
    assert "0 ms" not in texts(page, "#time b")
    for other in ("seed=2", "reward=short", "lr1=0.001"):
        follow(page, f"lang=en&{other}")
        assert page.run(curves) == 0
    follow(page, "lang=en")
    assert page.run(curves) == 4
    page.click("#run")
    rest(page, 0.5)
    assert "earlier run" not in page.run("document.body.innerText")


@pytest.mark.slow
def test_a_reward_of_the_reader_and_space_that_starts_but_not_where_one_writes(opened):
    page = opened(SMALL)
    page.run("expression.focus()")
    press(page, " ")
    press(page, "ArrowRight")
    assert texts(page, "#run") == ["Start"] and page.run("stage") == 0
    page.run("expression.blur()")
    before = page.run("scrollY")
    press(page, " ")  # and the page does not scroll
    assert texts(page, "#run") == ["Pause"] and page.run("scrollY") == before
    press(page, " ")
    assert page.run("running") is False

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
        assert page.run("$('status').textContent") == ""  # nobody learns
    page.click("[name=lang][value=zh]")
    assert texts(page, "#problem") == ["奖励必须是有限的数，不能是 Infinity。"]
    write("completion.length")
    assert page.run("form.elements.reward.value") == "own" and page.run("problem.textContent") == ""
    page.click("#one")
    wait_for_steps(page, 1)
    rest(page, 0.5)
    rows = page.run("lanes[1].result.groups[0].completions.map(c => [c.text.length, c.reward])")
    assert len(rows) == 4 and all(length == reward for length, reward in rows)


ADDRESSES = {
    "group_size=4&pruning_rate1=0.9375&method0=random&pruning_rate0=0.5":
        {"group_size": "4", "pruning_rate1": "0.75", "pruning_rate0": "0.5"},
    "group_size=32&questions_per_step1=16": {"group_size": "32", "questions_per_step1": "8"},
    "method0=grpo&pruning_rate0=0.5&lr0=7&beta=&seed=x&length=1&elements=2":
        {"pruning_rate0": "0", "lr0": "0.0001", "beta": "0.04", "seed": "1"},
}  # fmt: skip


@pytest.mark.slow
def test_an_address_gives_settings_that_fit_together(opened):
    page = opened("")
    for address, values in ADDRESSES.items():
        follow(page, address)
        for name, value in values.items():
            assert page.run(f"form.elements.{name}.value") == value
            assert f"{name}={value}" in page.run("location.hash")
