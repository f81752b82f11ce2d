"""experiments/microscope.py: it changes nothing in the step that it records. The numbers of
docs/step.html are calculated here a second time, without the project's functions."""

import json
import os
import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import nano
import train
from algorithms import ALGORITHMS
from engine.base import files
from engine.base.errors import UserError
from examples import my_loss
from experiments import microscope
from experiments.microscope import (
    MOVED,
    PAGE,
    completion_of,
    page_data,
    page_of,
    see_nano,
    step_of_run,
)
from tests.training import weights_of

pytestmark = pytest.mark.usefixtures("undrawn")
STEP = 3  # of nano.py; in its second update the clip acts on some tokens


def data_of(path):
    """The data in a page."""
    return json.loads(re.sub("^<.*?>|</script>$", "", microscope.DATA.search(path.read_text())[0]))


SHIPPED = data_of(PAGE)


@pytest.fixture(scope="module")
def seen():
    """A step of nano.py, in three micro-batches: of 6, 6 and 4 rows. losses: of its two updates."""
    updates_of, losses = microscope.updates_of, []

    def also_losses(calls, *others):
        losses.extend(call.value.item() for call in calls[nano.cppo_loss])
        return updates_of(calls, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano, "ROWS", 6)
        patch.setattr(microscope, "updates_of", also_losses)
        seen = microscope.step_of_nano(STEP)
    seen.losses = [sum(losses[:3]), sum(losses[3:])]
    return seen


# --- the step stays what it is ---


def test_the_recorded_step_changes_the_weights_as_the_step_does_bit_for_bit(loaded):
    """In the second step the random numbers after the first one count."""
    model, tokenizer = loaded
    asked = [nano.toy_question(i) for i in range(4)]
    made = [weights_of(model)]
    for step in (nano.step, partial(see_nano, nano.step, 1)):
        own = deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        torch.manual_seed(0)
        for _ in range(2):
            step(own, model, optimizer, tokenizer, nano.TOY, asked)
        made.append(weights_of(own))
    first, plain, recorded = made
    assert torch.equal(recorded, plain) and not torch.equal(plain, first)


# --- the numbers ---


def column(numbers, name):
    """The numbers that are there."""
    return torch.tensor([x for x in numbers[name] if x is not None], dtype=torch.float64)


def computed(logp, old, ref, A):
    """What the formulas of GRPO give for the tokens of a completion."""
    logp.requires_grad_()
    weight = torch.full_like(old, 1 / (16 * len(old)))
    ratio = (logp - old).exp()
    r = ref - logp
    surrogate = torch.minimum(A * ratio, A * ratio.clamp(0.8, 1.2))
    kl = r.exp() - r - 1
    part = -weight * (surrogate - 0.04 * kl)
    [gradient] = torch.autograd.grad(part.sum(), logp)
    return {"weight": weight, "ratio": ratio, "clipped": surrogate < A * ratio, "kl": kl,
            "surrogate": surrogate, "part": part, "gradient": gradient}


def test_the_numbers_of_the_page_are_those_of_the_formulas(seen):
    """A, ρ, the clip, k3, the weights, the parts, their sum and its gradient: in float64."""
    losses = [0.0, 0.0]
    clipped = tokens = moved = 0
    for number in range(1, nano.Q + 1):
        page = page_data(seen, number)
        group = [c for c in page["completions"] for _ in range(c["count"])]
        scores = torch.tensor([c["reward"] for c in group], dtype=torch.float64)
        A = (scores - scores.mean()) / (scores.std() + 1e-4)
        assert [c["advantage"] for c in group] == pytest.approx(A.tolist(), rel=1e-5)
        kept = [c for c in group if c["kept"]]
        assert (len(group), len(kept) * nano.Q) == (nano.G, page["trained"])
        assert not any(c["passes"] for c in group if not c["kept"])
        for c in kept:
            tokens += len(c["tokens"])
            moved += ((column(c, "after") - column(c, "before")).abs() > MOVED).sum()
            for one in c["passes"]:
                columns = [column(one, name) for name in ("logp", "old", "ref")]
                right = computed(*columns, c["advantage"])
                for name, values in right.items():
                    expected = values.double().tolist()
                    assert one[name] == pytest.approx(expected, rel=2e-5, abs=1e-6), name
                losses[one["update"] - 1] += right["part"].sum().item()
                clipped += right["clipped"].sum()
    for right in (seen.losses, [update["loss"] for update in page["updates"]]):
        assert losses == pytest.approx(right, abs=1e-5)
    assert (tokens, moved) == (page["tokens"], page["moved"])
    assert clipped > 0


def test_the_log_probabilities_are_those_of_each_model_in_float64(seen, loaded):
    """The reference has not learned. In the first update the policy is the one before the step."""
    tolerance = 0.1 if torch.cuda.is_available() else 2e-5  # on a GPU nano.py computes in bfloat16
    for row in seen.rows:
        c = completion_of(seen, row)
        first, second = c["passes"]
        assert first["logp"] == first["old"] == second["old"]
        assert c["before"] == pytest.approx(first["old"], abs=tolerance)
        prompt = seen.tokenizer(seen.questions[row // nano.G]["question"]).input_ids
        ids = seen.tokens[row, : len(c["tokens"])]
        for model, values in ((loaded[0], second["ref"]), (seen.model, c["after"])):
            whole = torch.tensor([[*prompt, *ids]], device=model.device)
            logp = deepcopy(model).double()(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            right = logp[torch.arange(len(ids)), ids].tolist()
            assert values == pytest.approx(right, abs=tolerance)


# --- runs of train.py ---

RUNS = {
    "own rule and reward, mini-batches": [
        "--keep", "examples/my_rule.py:per_token", "--minibatches", "2", "--rewards",
        "toy_accuracy", "examples/my_reward.py:shows_steps:0.1"],
    "GSPO": ["--algorithm", "gspo", "--questions_per_step", "4"],
    "the KL of DeepSeek": ["--algorithm", "deepseek_v32", "--micro_batch_tokens", "512",
                           "--questions_per_step", "4"],
    "adapters, on random prefixes": ["--lora", "4", "--shortest_prefix", "0.5"],
    "a tool": ["--dataset", "toy_tool", "--sampler", "examples/my_tool.py:WithCalculator",
               "--importance_weights", "token_truncate"],
}  # fmt: skip


def make_run(folder, *options):
    """A run of the toy that has ended, with its last two checkpoints. Returns its folder."""
    words = "--steps 2 --save_every 1 --eval_questions 4 --questions_per_step 2 --group_size 8"
    words += " --lr 3e-3 --dtype float32 --output_dir"
    train.main([*words.split(), str(folder), *options])
    return str(folder)


def contents(folder):
    found = [(path, path.stat()) for path in Path(folder).rglob("*")]
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_the_next_step_of_a_run_is_the_step_that_the_run_makes(options, tmp_path):
    """Bit for bit. The parts of the loss add up to the loss in the run's log."""
    run = make_run(tmp_path / "run", *options)
    before = contents(run)
    seen = step_of_run(run)  # after the last checkpoint but one
    assert contents(run) == before

    [file] = Path(run, "checkpoint-000002").glob("*model.safetensors")
    weights = {name.replace(".default", ""): w for name, w in seen.model.state_dict().items()}
    for name, saved in load_file(file).items():
        assert torch.equal(weights[name.removeprefix("base_model.model.")].cpu(), saved), name

    pages = [page_data(seen, n + 1) for n in range(len(seen.questions))]
    parts = 0.0
    for c in (c for page in pages for c in page["completions"]):
        for one in c["passes"]:
            parts += c["count"] * column(one, "part").sum().item()
            # N |o| times the weight is the product of the factors that the formula names
            N = pages[0]["updates"][one["update"] - 1]["completions"]
            factor = column(one, "weight") * N * len(column(c, "before"))
            prefix = "--shortest_prefix" in options
            assert (factor > 0.99).all() and (prefix or (factor < 1.01).all())
            log_ratio = column(one, "logp") - column(one, "old")
            if "gspo" in options:  # s_i, one for all tokens
                log_ratio = log_ratio.mean().expand(len(log_ratio))
            torch.testing.assert_close(column(one, "ratio"), log_ratio.exp(), rtol=2e-5, atol=0)
    last = files.read(Path(run, "metrics.jsonl"))[-1]
    named = " · 1/p_t" * prefix + " · w_t" * ("--importance_weights" in options)
    assert pages[0]["weight"] == "1 / (N |o_i|)" + named
    updates = pages[0]["updates"]
    assert parts / len(updates) == pytest.approx(last["loss"], abs=2e-5)
    assert pages[0]["trained"] == last["kept"] and pages[0]["step"] == 2
    keys = {line["key"] for line in pages[0]["lines"]}
    assert {"ref", "kl"} & keys == (set() if "gspo" in options else {"ref", "kl"})


def refused(reason, *words):
    with pytest.raises(UserError, match=f"^{reason}"):
        microscope.main(words)


def test_what_cannot_be_shown_gets_a_sentence(tmp_path, monkeypatch):
    reward = tmp_path / "reward.py"
    reward.write_text("def ones(completions, **columns):\n    return [1.0] * len(completions)\n")
    run = make_run(tmp_path / "run", "--rewards", f"{reward}:ones")
    refused(f"step 2 of {run} has nothing to learn from", run)
    own_row = replace(ALGORITHMS["grpo"], loss=my_loss.dual_clip_loss)
    monkeypatch.setitem(ALGORITHMS, "own", own_row)
    own = make_run(tmp_path / "own", "--algorithm", "own")
    refused("the loss of own does not call grpo.surrogate_loss", own)
    refused("--step is for nano.py", run, "--step", "3")
    refused(f"{tmp_path} holds no run of train.py", str(tmp_path))
    with pytest.raises(UserError, match="trains with PPO, in which each token has an advantage"):
        microscope.see_train(run, None, SimpleNamespace(critic=True))

    options = Path(run, "run.json")
    options.write_text(options.read_text().replace("{", '{"unknown": 1, ', 1))
    refused(f"{run} was started by another version of train.py", run)
    for path in Path(run).glob("checkpoint-*/model.safetensors"):
        path.write_bytes(b"damaged")
    before = contents(run)
    refused(f"{run} holds no whole checkpoint", run)
    assert contents(run) == before
    options.write_text("{")
    refused(run, run)


def test_main_writes_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(microscope, "step_of_nano", lambda number: {"step": number})
    monkeypatch.setattr(
        microscope, "page_data", lambda seen, number: SHIPPED | seen | {"number": number})
    microscope.main(["--step", "40", "--question", "3"])
    assert data_of(Path("step.html")) == SHIPPED | {"step": 40, "number": 3}
    monkeypatch.setattr(microscope, "step_of_nano", None)  # nothing is computed before
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused("step.html cannot be written into this folder")


# --- the page ---


def test_the_shipped_page_shows_the_lines_of_the_files_and_loads_nothing(seen):
    text = PAGE.read_text()
    assert SHIPPED["lines"] == seen.lines and (SHIPPED["step"], SHIPPED["tokens"]) == (13, 307)
    assert PAGE.stat().st_size <= 60_000
    loads = r"https?:|\bsrc\s*=|@import|url\(|\bfetch\(|\bimport\b|XMLHttpRequest|innerHTML"
    assert not re.search(loads, text)


def test_a_step_without_a_signal_and_a_question_that_is_missing_get_a_sentence(
        seen, loaded, monkeypatch):
    model, tokenizer = loaded
    monkeypatch.setattr(nano, "reward", lambda text, answer: 1.0)
    own = (model, model, None, tokenizer, nano.TOY, [nano.toy_question(0)])
    with pytest.raises(UserError, match="step 1 of nano.py has nothing to learn from: "):
        see_nano(nano.step, 1, *own)
    with pytest.raises(UserError, match="--question must lie in 1 … 8, not 9"):
        page_data(seen, 9)


# --- in the browser ---


KEY = "document.dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
# the texts of an element that are not inside the window
OUTSIDE = """[...document.querySelectorAll("h1, #about, #question, .facts > *, .row > *, #said p")]
  .filter(node => { const r = node.getBoundingClientRect(); return r.width === 0 && node.textContent
    || r.top < 0 || r.left < 0 || r.bottom > innerHeight || r.right > innerWidth; })
  .map(node => node.textContent)"""
NUMBER = re.compile(r"[−+]?\d+(?:[.,]\d+)*")
# what stays in Latin letters: also the tags of the tokens, and π_old
NAMES = {"English", "python", "nano", "py", "token", "log", "AdamW", "KL", "logit", "think",
         "answer", "old"}
# what the page says beside its code and its tokens
SAID = """(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const texts = [document.title, document.querySelector(".chosen").ariaLabel];
  while (walker.nextNode()) {
    const { parentNode, data } = walker.currentNode;
    if (parentNode.closest("header, main") && !parentNode.closest("code, .token")) texts.push(data);
  }
  return texts.join("\\n");
})()"""
NUMBERS = "[...document.querySelectorAll('#lines b')].map(node => node.textContent)"
LABEL = "document.querySelector('.chosen').ariaLabel"  # what a screen reader says


def shown(x):
    """A number as the page writes it; −0 is 0."""
    return f"{round(x, 3) or 0:.3f}".replace("-", "−")


@pytest.mark.slow
def test_the_page_shows_the_numbers_of_each_token(browser):
    page = browser.open(f"{PAGE}#lang=en", 1280, 900)
    page.run("choose(0, 0)")
    first = SHIPPED["completions"][0]
    one = first["passes"][-1]
    for t in range(len(first["tokens"])):
        change = first["after"][t] - first["before"][t]
        advantage, kept, _, ref, logp, old, ratio, *_, gradient, moved = page.run(NUMBERS)
        assert advantage == f"{first['advantage']:+.2f}".replace("-", "−") and kept == "kept"
        assert [ref, logp, old, ratio] == [
            shown(one[name][t]) for name in ("ref", "logp", "old", "ratio")]
        assert (gradient[0] == "+") == (one["gradient"][t] > 0)
        assert moved.lstrip("+−") == shown(abs(change))
        assert f"ratio {ratio}, KL " in page.run(LABEL)
        page.run(KEY % "ArrowRight")
    page.run(KEY % "ArrowLeft")  # from the last token
    assert page.run("document.activeElement.dataset.at") == f"0 {len(first['tokens']) - 2}"
    assert page.run("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    page.run("choose(0, 0)")
    page.click("#updates button")  # the first update: π is still π_old
    assert page.run(NUMBERS)[6] == "1.000"
    for _ in SHIPPED["completions"]:
        page.run(KEY % "ArrowDown")
    assert page.run(NUMBERS)[2:4] == ["–", "–"]  # a pruned one
    assert "was pruned" in page.run("document.querySelector('#said').textContent")


@pytest.mark.slow
@pytest.mark.parametrize("width, height", [(1280, 900), (390, 844)])
def test_both_languages_say_the_same_numbers(browser, width, height):
    page = browser.open(f"{PAGE}#lang=zh", width, height)
    texts = {}
    places = "[...document.querySelectorAll('section')].map(s => s.getBoundingClientRect().left)"
    assert len(set(page.run(places))) == (2 if width > 900 else 1)
    for completion in range(len(SHIPPED["completions"])):
        page.run(f"choose({completion}, 0)")
        for lang in ("zh", "en"):
            page.run(f"state.lang = '{lang}', draw()")
            texts[lang] = page.run(SAID)
            assert page.run("document.documentElement.scrollWidth") <= width
            assert width < 900 or page.run(OUTSIDE) == []
        assert set(re.findall("[一-鿿]+", texts["en"])) == {"中文"}
        assert set(re.findall("[A-Za-z]{2,}", texts["zh"])) <= NAMES
        assert sorted(NUMBER.findall(texts["zh"])) == sorted(NUMBER.findall(texts["en"]))


@pytest.mark.slow
def test_a_completion_is_text_and_never_markup(browser, tmp_path):
    hostile = ["</script><script>window.hit = 1</script>", "</style><style>*{display:none}", "\0",
               "<img src=x onerror='window.hit = 2'>", "😀", "", "\ud83d", "\u2028", "x" * 100_000,
               "{0}$&", "&lt;b&gt;", "<!--"]
    data = deepcopy(SHIPPED) | {"question": hostile[0], "answer": hostile[1]}
    first = data["completions"][0]
    for numbers in (first, *first["passes"]):
        for name, column in numbers.items():
            if isinstance(column, list) and name != "passes":
                numbers[name] = column[:1] * len(hostile)
    first["tokens"] = hostile
    path = tmp_path / "step.html"
    path.write_text(page_of(data), encoding="utf-8")
    page = browser.open(f"{path}#lang=en", 1280, 900)
    for i, text in enumerate(hostile):
        page.run(f"choose(0, {i})")
        assert page.run("document.querySelectorAll('script').length") == 2
        if len(text) > 3:
            where = page.run("document.querySelector('#where code').textContent")
            assert where == text[:40]
    assert page.run("window.hit ?? 0") == 0
    assert page.run("document.documentElement.scrollWidth") <= 1280
    for c in data["completions"]:  # of another rule: nothing of this question is kept
        c |= {"kept": False, "passes": [], "tokens": c["tokens"][:3]}
    path.write_text(page_of(data), encoding="utf-8")
    page = browser.open(f"{path}#lang=en", 1280, 900)
    assert page.run(NUMBERS)[1:3] == ["pruned", "–"]
