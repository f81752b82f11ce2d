"""experiments/microscope.py: it changes nothing in the step that it records. The numbers of
docs/step.html are calculated here a second time, without the project's functions."""

import json
import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nano
import train
from engine.base import files
from engine.base.errors import UserError
from experiments import microscope
from experiments.microscope import MOVED, PAGE, completion_of, page_data, page_of

pytestmark = pytest.mark.usefixtures("undrawn")
STEP = 3  # of nano.py; in its second update the clip acts on some tokens


def data_of(text):
    """The data in a page."""
    return json.loads(re.sub("^<.*?>|</script>$", "", microscope.DATA.search(text)[0]))


SHIPPED = data_of(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def seen():
    """A step of nano.py, in three micro-batches: of 6, 6 and 4 rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano, "ROWS", 6)
        return microscope.step_of_nano(STEP)


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
    assert losses == pytest.approx([update["loss"] for update in page["updates"]], abs=1e-5)
    assert (tokens, moved) == (page["tokens"], page["moved"])
    assert clipped > 0 and page["lines"] == SHIPPED["lines"]


def test_the_log_probabilities_are_those_of_each_model_in_float64(seen, loaded):
    """The reference has not learned. In the first update the policy is the one before the step."""
    row = seen.rows[0]
    c = completion_of(seen, row)
    first, second = c["passes"]
    assert first["logp"] == first["old"] == second["old"]
    tolerance = 0.1 if torch.cuda.is_available() else 2e-5  # on a GPU nano.py computes in bfloat16
    assert c["before"] == pytest.approx(first["old"], abs=tolerance)
    prompt = seen.tokenizer(seen.questions[row // nano.G]["question"]).input_ids
    ids = seen.tokens[row, : len(c["tokens"])]
    for model, values in ((loaded[0], second["ref"]), (seen.model, c["after"])):
        whole = torch.tensor([[*prompt, *ids]], device=model.device)
        logp = deepcopy(model).double()(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        right = logp[torch.arange(len(ids)), ids].tolist()
        assert values == pytest.approx(right, abs=tolerance)


# --- a run of train.py ---


def test_the_next_step_of_a_run_is_the_step_that_the_run_makes(tmp_path, monkeypatch):
    """Bit for bit. The parts of the loss add up to the loss in the run's log."""
    monkeypatch.chdir(tmp_path)
    words = "--steps 2 --save_every 1 --eval_questions 4 --questions_per_step 2 --group_size 8"
    words += " --minibatches 2 --lr 3e-3 --dtype float32 --output_dir run"
    train.main(words.split())
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    seen = microscope.step_of_run("run")  # after the last checkpoint but one
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before

    weights = seen.model.state_dict()
    for name, saved in load_file("run/checkpoint-000002/model.safetensors").items():
        assert torch.equal(weights[name], saved), name
    pages = [page_data(seen, number + 1) for number in range(len(seen.questions))]
    parts = 0.0
    for c in (c for page in pages for c in page["completions"]):
        parts += c["count"] * sum(column(one, "part").sum().item() for one in c["passes"])
    last = files.read(Path("run/metrics.jsonl"))[-1]
    assert parts / len(seen.updates) == pytest.approx(last["loss"], abs=2e-5)

    microscope.main(["run"])
    written = data_of(Path("step.html").read_text(encoding="utf-8"))
    assert written in pages and written["step"] == 2
    for reason, words in {
        "--question must lie in 1 … 8, not 9": ["run", "--question", "9"],
        "--step is for nano.py": ["run", "--step", "3"],
        ". holds no run of train.py": ["."],
    }.items():
        with pytest.raises(UserError, match=f"^{re.escape(reason)}"):
            microscope.main(words)


# --- the page ---


def test_a_completion_is_data_and_never_ends_it():
    hostile = SHIPPED | {"question": "</script><script>alert(1)</script><!--"}
    assert data_of(page_of(hostile)) == hostile


KEY = "document.dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
NUMBERS = "[...document.querySelectorAll('#lines b')].map(node => node.textContent)"


def shown(x):
    """A number as the page writes it; −0 is 0."""
    return f"{round(x, 3) or 0:.3f}".replace("-", "−")


@pytest.mark.slow
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_page_shows_the_numbers_of_each_token(browser, lang):
    page = browser.open(f"{PAGE}#lang={lang}", 1280, 900)
    page.run("choose(0, 0)")
    first = SHIPPED["completions"][0]
    one = first["passes"][-1]
    for t in range(len(first["tokens"])):
        change = first["after"][t] - first["before"][t]
        advantage, _, _, ref, logp, old, ratio, *_, gradient, moved = page.run(NUMBERS)
        assert advantage == f"{first['advantage']:+.2f}".replace("-", "−")
        assert [ref, logp, old, ratio] == [
            shown(one[name][t]) for name in ("ref", "logp", "old", "ratio")]
        assert (gradient[0] == "+") == (one["gradient"][t] > 0)
        assert moved.lstrip("+−") == shown(abs(change))
        page.run(KEY % "ArrowRight")
    page.click("#updates button")  # the first update: π is still π_old
    assert page.run(NUMBERS)[6] == "1.000"
    for _ in SHIPPED["completions"]:
        page.run(KEY % "ArrowDown")
    assert page.run(NUMBERS)[2:4] == ["–", "–"]  # a pruned one
