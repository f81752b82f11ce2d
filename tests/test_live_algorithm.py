"""docs/live: the page's JavaScript pays what rewards.py pays and samples as our sampler does, and a
step of a lane is a step of train.py. test_golden.py checks its functions of GRPO and CPPO with
conformance/golden.json."""

import pytest
import torch

from algorithms import resolve
from engine.model.logprobs import Policy
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Sampling
from loop.records import TrainingProgress
from rewards import toy_accuracy
from tasks import toy
from tests.helpers.live import (
    close,
    flat,
    model_of_page,
    needs_node,
    rounded_weights,
    run_js,
    trained_on,
    weights_in_base64,
)
from tests.helpers.training import networks_around

pytestmark = needs_node
F64 = torch.float64


# --- the task ---


# --- sampling, and a step of a lane ---

JS_SAMPLE = """
const sampling = { temperature: given.temperature, max_new_tokens: 48 };
return sample(make_model(bytes), given.prompts, given.G, sampling, given.uniform, {});"""


@pytest.mark.parametrize("temperature,questions,G", [(0.0, 16, 1), (0.7, 4, 8)])
def test_completions_token_by_token(temperature, questions, G):
    """Greedy ones, and ones that given uniform numbers draw."""
    model, tokenizer = model_of_page()
    prompts = [tokenizer.encode(toy.question(i)["question"]) for i in range(questions)]
    prompts[1] = prompts[1][2:]  # a shorter prompt
    shape = (questions, G, 48)
    uniform = torch.rand(shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    here = run_js(JS_SAMPLE, base64=weights_in_base64(), prompts=prompts, G=G,
                  temperature=temperature, uniform=uniform.flatten().tolist())
    sampler = Sampler(model.float(), tokenizer)
    there = sampler.sample(prompts, G, Sampling(48, temperature=temperature), seed=2)
    rows = zip(there.tokens.tolist(), there.lengths.tolist())
    assert here == [tokens[:length] for tokens, length in rows]
    assert len(set(map(len, here))) > 1  # they end at different times


JS_STEPS = """
const settings = { ...default_settings(given.method), ...given.settings };
const lane = make_lane(bytes, settings, answer_right);
const steps = [lane.step(), lane.step()];
return [steps, [...lane.model.weights]];"""
SMALL = {"group_size": 8, "pruning_rate": 0.75, "questions_per_step": 2}
LANES = {
    "grpo": SMALL | {"beta": 0.0, "mu": 1, "lr": 1e-3},
    "cppo": SMALL | {"mu": 3, "epsilon": 0.1, "beta": 0.2, "lr": 1e-3},
    "pooled": SMALL | {"temperature": 0.9, "lr": 1e-3},
    "random": SMALL | {"beta": 0.5, "epsilon": 0.3, "lr": 3e-4},
    "drgrpo": SMALL | {"mu": 1, "lr": 2e-3},
}


def rows_of(step):
    return [row for group in step["groups"] for row in group["completions"]]


def algorithm_of(method, steps, *, beta=None, mu=2, epsilon=0.2, **_):
    """The row of a lane with its settings. A random choice is that of the page."""
    def of_page(rollout, advantages, k):
        rows = rows_of(steps[rollout.step - 1])
        return torch.tensor([i for i, row in enumerate(rows) if row["kept"]])

    rule = {"pooled": "pooled", "random": of_page}.get(method)
    return resolve(
        method if method in ("grpo", "drgrpo") else "cppo", keep=rule, group_size=8, beta=beta,
        mu=mu, clip_low=epsilon, clip_high=epsilon)  # CPPO's P is 0.75


@pytest.mark.parametrize("method", LANES)
def test_two_steps_of_a_lane_are_two_steps_of_training(method):
    settings = LANES[method]
    steps, weights = run_js(JS_STEPS, base64=weights_in_base64(), method=method,
                            settings=settings | {"method": method, "seed": 3})
    model, tokenizer = model_of_page()
    temperature = settings.get("temperature", 1.0)
    algorithm = algorithm_of(method, steps, **settings)
    networks = networks_around(
        Policy(model.float(), temperature=temperature), tokenizer, lr=settings["lr"],
        beta=algorithm.beta)
    for number, step in enumerate(steps, 1):
        rows, texts = rows_of(step), [row["text"] for row in rows_of(step)]
        asked = [{"prompt": tokenizer.encode(group["question"]), "answer": group["answer"]}
                 for group in step["groups"]]
        ours = trained_on(
            texts, networks, algorithm, asked, toy_accuracy, temperature=temperature,
            so_far=TrainingProgress(number))
        metrics = ours.metrics
        assert [row["length"] for row in rows] == ours.rollout.lengths.flatten().tolist()
        assert [row["reward"] for row in rows] == ours.rollout.total.flatten().tolist()
        close([row["advantage"] for row in rows], ours.advantages.flatten(), 1e-6)
        assert [i for i, row in enumerate(rows) if row["kept"]] == ours.kept.tolist()
        assert step["step"] == number and step["completions"] == 16 * number
        assert step["accuracy"] == step["reward"] == metrics["reward"]
        assert step["updates"] == algorithm.mu
        here = [step[name] for name in ("loss", "kl", "clip_fraction", "gradient_norm")]
        there = [metrics[name] or 0 for name in ("loss", "kl", "clip_fraction", "grad_norm")]
        assert here == pytest.approx(there, rel=1e-3, abs=2e-5)
    trained = flat(dict(model.named_parameters())).double()
    moved = trained - flat(rounded_weights()).double()
    assert (torch.tensor(weights, dtype=F64) - trained).norm() < 0.01 * moved.norm()
