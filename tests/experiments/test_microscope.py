"""experiments/microscope.py: it changes nothing in the step that it records. The numbers of
docs/step.html are calculated here a second time, without the project's functions. What the page's
JavaScript computes with other settings is what the project's functions compute."""

import json
import math
import re
from copy import deepcopy

import pytest
import torch

import allocate
import cppo
import grpo
import nano
from experiments import microscope
from experiments.microscope import PAGE, completion_of, page_data, page_of
from family import ppo
from tests.helpers.live import close, needs_node, run_js
from tests.helpers.training import completion_logprobs

STEP = 3  # of nano.py; in its second update the clip acts on some tokens
TOLERANCE = 0.1 if torch.cuda.is_available() else 2e-5  # on a GPU nano.py computes in bfloat16


def data_of(text):
    """The data in a page."""
    return json.loads(re.sub("^<.*?>|</script>$", "", microscope.DATA.search(text)[0]))


SHIPPED = data_of(PAGE.read_text())


@pytest.fixture(scope="module")
def seen():
    """A step of nano.py, in three micro-batches: of 6, 6 and 4 rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(nano.TOY, "rows", 6)
        return microscope.step_of_nano(STEP)


# --- the numbers ---

COMPUTE = (PAGE.parent / "step/compute.js").read_text()
LOSS = "ratio", "clipped", "surrogate", "kl", "weight", "part", "gradient"


def recomputed(page, settings):
    """What the page's JavaScript computes."""
    code = COMPUTE + "return recomputed(given.page, given.settings);"
    return run_js(code, page=page, settings=settings)


@needs_node
def test_the_numbers_of_nano_are_those_of_the_formulas(seen):
    """A, ρ, the clip, k3, the weights, the parts, their sum and its gradient, in the page's
    JavaScript. A pruned completion has the log π of a kept one with the same tokens."""
    losses, clipped, tokens, same = [0.0, 0.0], 0, 0, {}
    for number in range(1, nano.Q + 1):
        page = page_data(seen, number)
        now = recomputed(page, page["settings"])
        for shipped, c in zip(page["completions"], now["completions"]):
            assert c["advantage"] == pytest.approx(shipped["advantage"], rel=1e-5)
            assert c["kept"] == shipped["kept"] * len(shipped["members"])
            tokens += c["kept"] * len(shipped["tokens"])
            logp = shipped["passes"][1]["logp"]
            twin = same.setdefault((number, *shipped["tokens"]), logp)
            assert logp == pytest.approx(twin, abs=TOLERANCE)
            for one, recorded in zip(c["passes"], shipped["passes"]):
                for name in LOSS:
                    assert one[name] == pytest.approx(recorded[name], rel=2e-5, abs=1e-6), name
                losses[one["update"] - 1] += c["kept"] * sum(one["part"])
                clipped += sum(one["clipped"])
    assert losses == pytest.approx([update["loss"] for update in page["updates"]], abs=1e-5)
    assert tokens == page["tokens"] and clipped > 0


def padded(numbers):
    """A number for each token of some completions, (N, T): 0 after their ends."""
    rows = [torch.tensor(row, dtype=torch.float64) for row in numbers]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def python(passes, A, rewards, epsilon, beta):
    """(J, {row: (N, T)}, the mask): what Python computes for N kept completions in one update."""
    logp, old, ref = (padded(one[name] for one in passes) for name in ("logp", "old", "ref"))
    mask = padded([1] * len(one["old"]) for one in passes)
    loss, _ = cppo.cppo_loss(logp.requires_grad_(), old, A, mask, ref_logp=ref, beta=beta,
                             clip_low=epsilon)
    loss.backward()
    token_reward = ppo.token_rewards(rewards, old, ref, mask, beta=beta)
    gae, _ = ppo.gae(token_reward, 0 * old, mask, gamma=1.0, lam=1.0)
    ratio = grpo.importance_ratio(logp, old, mask)
    return -loss, {
        "gradient": logp.grad / SHIPPED["questions"], "k1": grpo.kl_k1(logp, ref),
        "k2": grpo.kl_k2(logp, ref), "token_reward": token_reward, "gae": gae,
        "ppo": grpo.clipped_surrogate(ratio, gae, clip_low=epsilon)}, mask


@needs_node
@pytest.mark.parametrize("G, P, epsilon, beta", [
    (16, 0.875, 0.2, 0.04), (16, 0.0, 0.05, 0.04), (16, 0.5, 0.2, 0.2), (10, 0.9, 0.01, 0.0),
    (7, 0.25, 0.3, 0.1), (2, 0.5, 0.2, 0.04)])  # the first are the step's own
def test_the_sliders_compute_what_python_computes(G, P, epsilon, beta):
    """To 1e-6: J and its gradient, and what is computed for the group."""
    now = recomputed(SHIPPED, {"G": G, "P": P, "epsilon": epsilon, "beta": beta})
    number, rewards = SHIPPED["number"] - 1, torch.tensor(SHIPPED["rewards"])[:, :G].double()
    advantages = grpo.group_advantages(rewards).round(decimals=9)
    k = cppo.keep_count(G, P)
    kept, A = cppo.prune(advantages, k), advantages[number]
    own = kept[number]
    lengths = torch.tensor(SHIPPED["lengths"])[:, :G].flatten()[cppo.batch_rows(kept, G)].tolist()
    norms = {i: c["norm"] for c in SHIPPED["completions"] for i in c["members"]}
    added = A.abs() * torch.tensor([norms[i] for i in range(G)])
    total = added.sum() or 1.0  # if all rewards are equal, no completion adds anything
    shares = [sum(lengths[i] for i in share) for share in allocate.balance(lengths, 2)]
    above = cppo.prune_below(advantages, A[own].abs().min()).sum(1).tolist()
    right = {
        "k": k, "kept": own, "advantages": A, "above": above, "bucket": shares,
        "pooled": (cppo.prune_pooled(advantages, kept.numel()) // G == number).sum(),
        "fill": allocate.fill(above, G),
        "added": added, "share": added[own].sum() / total,
        "best": added.topk(k).values.sum() / total,
        "micro": -(-kept.numel() // nano.TOY["rows"]), "rewards": rewards[number]}
    for name, x in right.items():
        close(now[name], torch.as_tensor(x), 1e-6)
    everything = recomputed(SHIPPED, {"G": G, "P": 0.0, "epsilon": epsilon, "beta": beta})
    assert now["whole"] == everything["objective"]
    found = [c for c in now["completions"] for _ in range(c["kept"])]
    places = [c["place"] for c in found]
    for u, objective in enumerate(now["objective"]):
        passes = [c["passes"][u] for c in found]
        J, tokens, mask = python(passes, A[places], rewards[number][places], epsilon, beta)
        assert objective == pytest.approx(J.item(), abs=1e-6)
        for name, x in tokens.items():
            close(padded(one[name] for one in passes).tolist(), (x * mask).detach(), 1e-6)


def test_the_log_probabilities_are_those_of_each_model(seen, loaded):
    """The reference has not learned. In the first update the policy is the one before the step."""
    row = seen.rows[0]
    c = completion_of(seen, row)
    first, second = c["passes"]
    assert first["logp"] == first["old"] == second["old"]
    assert c["before"] == pytest.approx(first["old"], abs=TOLERANCE)
    prompt = seen.tokenizer(seen.questions[row // nano.G]["question"]).input_ids
    tokens, mask = seen.tokens[[row]], seen.mask[[row]]
    for model, values in ((loaded[0], second["ref"]), (seen.model, c["after"])):
        own = deepcopy(model).cpu().float()
        with torch.no_grad():
            right = completion_logprobs(own, [prompt], tokens, mask)[mask]
        assert values == pytest.approx(right.tolist(), abs=TOLERANCE)


def test_the_length_of_a_gradient_is_that_of_the_model_before_the_step(loaded, monkeypatch):
    """‖∇_θ 1/|o| Σ_t log π‖ of the base model, through the tests' own log π."""
    monkeypatch.setattr(nano, "Q", 1)
    first, own = microscope.step_of_nano(1), deepcopy(loaded[0]).cpu().float()
    prompt = first.tokenizer(first.questions[0]["question"]).input_ids
    for row in first.rows:
        tokens, mask = first.tokens[[row]], first.mask[[row]]
        mean = completion_logprobs(own, [prompt], tokens, mask)[mask].mean()
        gradient = torch.autograd.grad(mean, [*own.parameters()])
        right = math.sqrt(sum(g.square().sum().item() for g in gradient))
        assert first.norms[row] == pytest.approx(right, rel=1e-3)


# --- the page ---


def test_the_page_is_what_its_parts_make():
    pytest.importorskip("latex2mathml", reason="pip install -r requirements-dev.txt")
    from docs.step import build

    text = PAGE.read_text()
    # another version of the converter may write other MathML
    here, made = (re.sub("(<math.*?>).*?</math>", r"\1", x) for x in (text, build.page(text)))
    assert here == made, "stale: python docs/step/build.py"
    assert not re.search(r"https?://(?!www\.w3)|\bsrc\s*=|@import|\bfetch\(", text)


def test_a_completion_is_data_and_never_ends_it():
    hostile = SHIPPED | {"question": "</script><script>alert(1)</script><!--"}
    assert data_of(page_of(hostile)) == hostile


KEY = "document.dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
NUMBERS = """Object.fromEntries([...document.querySelectorAll("article")].map(
  row => [row.id, row.querySelector("b").textContent]))"""
@pytest.mark.slow
def test_the_page_shows_the_numbers_of_each_token(browser):
    page = browser.open(f"{PAGE}#lang=en", 1280, 900)
    page.run("choose(0, 0)")
    first = SHIPPED["completions"][0]
    one = first["passes"][-1]
    for t in range(len(first["tokens"])):
        numbers = page.run(NUMBERS)
        assert all(number not in ("", "–") for number in numbers.values())
        for name in ("ref", "logp", "old", "ratio"):
            shown = f"{round(one[name][t], 3) or 0:.3f}"  # −0 is 0
            assert numbers[name] == shown.replace("-", "−")
        assert (numbers["gradient"][0] == "+") == (one["gradient"][t] > 0)
        page.run(KEY % "ArrowRight")
