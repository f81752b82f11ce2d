"""examples/: a reward, a rule, an algorithm and a data set of one's own, each run as its first
lines say."""

import re
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2ForCausalLM

import train
from algorithms import ALGORITHMS, resolve
from engine.base import files
from engine.base.errors import UserError
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Sampling
from engine.options.config import config_of
from examples import my_sampler
from examples.my_algorithm import by_length
from examples.my_loss import dual_clip_loss, with_entropy
from examples.my_reward import brevity, shows_steps
from examples.my_rule import group_length, per_token
from experiments.library import toy_model
from tasks import toy
from tests.helpers.runs import ROOT, json_of
from tests.helpers.training import a_rollout, completion_logprobs, completions, one_step, updated

pytestmark = pytest.mark.usefixtures("undrawn")


def test_rules_of_ones_own():
    rollout = SimpleNamespace(lengths=torch.tensor([[2, 8, 2], [1, 3, 2]]))
    advantages = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.3, -0.4]])
    # |A| / length: 0.5, 0.25, 0.25; 0, 0.1, 0.2
    assert per_token(rollout, advantages, 1).tolist() == [0, 5]
    rows, own = group_length(rollout, advantages, 2)
    # A |o| / 4; and / 2
    assert rows.tolist() == [0, 1, 4, 5] and own.tolist() == pytest.approx([0.5, -4, 0.45, -0.4])


@pytest.mark.parametrize("name", ["gfpo", "gfpo_adaptive"])
def test_a_metric_of_ones_own_is_gfpos_filter(name):
    """The shortest with the form are kept, and only they are compared with each other."""
    _, algorithm = config_of({
        "algorithm": name, "keep": str(ROOT / "examples/my_rule.py:short_and_formed"),
        "group_size": 8})
    formed = "<think>1+1=2;</think>\n<answer>2</answer>"
    texts = [formed, "<answer>2</answer>"] * 4
    rewards = torch.tensor([[1.0, 1, 0, 0, 1, 0, 0, 0]])
    rollout = a_rollout(rewards, torch.tensor([[9, 1, 7, 2, 5, 3, 8, 4]]), texts=texts)
    rows, advantages = algorithm.keep_completions(rollout, torch.zeros(1, 8))
    kept = [0, 2, 4, 6] if name == "gfpo" else [*range(8)]  # no history yet: the largest k
    assert rows.tolist() == kept
    assert abs(advantages[0, kept].mean()) < 1e-6 and advantages[0, 0] > 0 > advantages[0, 2]


def test_rewards_of_ones_own_pay_for_a_calculation_and_for_brevity():
    texts = ["<think>7+8=15;</think>", "<answer>15</answer>", "7=", ""]
    assert shows_steps(texts, answer=[""] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert brevity(["", "x" * 20, "x" * 200], answer=["", "", ""]) == [1.0, 0.8, 0.0]


def test_an_advantage_of_ones_own_compares_with_a_mean_by_length():
    lengths = torch.tensor([[1, 2, 2, 5], [3, 1, 1, 1]])
    rewards = torch.tensor([[1.0, 0, 0, 0], [2, 1, 1, 0]])
    A = by_length(SimpleNamespace(total=rewards, lengths=lengths))
    expected = [[0.9, -0.1, -0.1, -0.1], [2 / 3, -1 / 3, -1 / 3, -4 / 3]]
    torch.testing.assert_close(A, torch.tensor(expected))


def test_a_loss_of_ones_own_bounds_a_bad_token_that_has_become_likely():
    """The ratios 1, 2, 4 at A = −2 and 0.5: 3A takes the place of 4A, and nothing else changes."""
    logp = torch.tensor([[1.0, 2.0, 4.0]] * 2, dtype=torch.float64).log().requires_grad_()
    A, old_logp, mask = torch.tensor([-2.0, 0.5]), torch.zeros(2, 3), torch.ones(2, 3).bool()
    clip = {"weights": torch.ones(2, 3), "beta": 0.0, "clip_low": 0.2, "clip_high": 0.2}
    loss, stats = dual_clip_loss(logp, old_logp, A, mask, **clip)
    assert loss.item() == pytest.approx(2 + 4 + 6 - 0.5 - 0.6 - 0.6)
    # ∂ loss / ∂ log π = −ρA, and 0 where a bound acts
    gradient = torch.autograd.grad(loss, logp)[0]
    torch.testing.assert_close(gradient, torch.tensor([[2.0, 4, 0], [-0.5, 0, 0]]).double())
    assert stats["clip_fraction"].item() == pytest.approx(1 / 6)


def test_a_loss_of_ones_own_may_ask_for_the_entropy(loaded, monkeypatch):
    model, tokenizer = loaded
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    losses, entropies = [], []
    for loss, wants in [(dual_clip_loss, ()), (with_entropy, ("entropy",))]:
        row = replace(ALGORITHMS["dapo"], loss=loss, wants=wants)
        monkeypatch.setitem(ALGORITHMS, "mine", row)
        stats = updated(model, still, [completions(tokenizer)], resolve("mine"))
        losses.append(stats["loss"])
        entropies.append(stats["entropy_trained"])
    assert losses[1] == pytest.approx(losses[0] - 0.001 * entropies[1], abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("program, name", [("my_algorithm", "mine"), ("my_loss", "with_entropy")])
def test_a_run_takes_an_algorithm_of_ones_own(program, name, small, tmp_path):
    words = ["--algorithm", name, "--eval_questions", "1"]
    assert one_step(small, tmp_path, *words, program=f"examples/{program}.py")["kept"] == 16


def test_a_run_takes_a_data_set_a_rule_and_a_reward_of_ones_own(small, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--dataset", "examples/my_dataset.jsonl", "--max_new_tokens", "8",
             "--keep", "examples/my_rule.py:per_token", "--rewards", "number_accuracy",
             "examples/my_reward.py:brevity:0.1"]
    metrics = one_step(small, tmp_path, *words)
    assert metrics["kept"] == metrics["completions"] // 4 and metrics["questions"] == 4
    assert "reward/number_accuracy" in metrics and 0 < metrics["reward/brevity"] < 1


def test_word_problems_in_digits_run_offline_with_the_toy(tmp_path, monkeypatch):
    """The toy's length is the default."""
    monkeypatch.chdir(ROOT)
    for row in files.read_lines("examples/my_digits.jsonl"):
        assert row["answer"] == str(sum(map(int, re.findall("[+-]?[0-9]", row["question"]))))
    assert one_step("toy", tmp_path, "--dataset", "examples/my_digits.jsonl")["accuracy"] > 0.1
    assert json_of(tmp_path / "run.json")["max_new_tokens"] == toy.MAX_NEW_TOKENS


VLLM = pytest.param("vllm_sampler.py:VLLM", marks=[pytest.mark.slow, pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed")])


@pytest.mark.parametrize("own", ["my_sampler.py:Generate", VLLM])
def test_a_run_takes_a_sampler_of_ones_own(own, tmp_path):
    """Its log-probabilities are the trainer's, also after an update: with old weights the gap would
    be about `approx_kl`."""
    torch.manual_seed(0)
    tokenizer = toy_model.make_tokenizer()
    config = toy_model.make_config(tokenizer)
    # smaller heads are too small for vLLM's kernels
    config.num_attention_heads = config.num_key_value_heads = 2
    toy_model.save(tmp_path / "model", Qwen2ForCausalLM(config), tokenizer)
    words = ["--sampler", f"examples/{own}", "--eval_questions", "2", "--lr", "1e-2",
             "--warmup", "0", "--model", f"{tmp_path}/model", "--questions_per_step", "1",
             "--rewards", "examples/my_reward.py:brevity", "--dtype", "float32"]
    assert train.main([*words, "--steps", "2", "--output_dir", f"{tmp_path}/run"]) == 0
    first, second = files.read_lines(tmp_path / "run/metrics.jsonl")
    assert first["approx_kl"] > 1e-2
    assert first["sampler_logp_diff_max"] < 1e-3 and second["sampler_logp_diff_max"] < 1e-3
    with pytest.raises(UserError, match="leave out --lora"):
        train.main([*words, "--lora", "4"])


@pytest.mark.parametrize("sampling", [Sampling(24, 0.7), Sampling(24, 0.0)])
def test_a_sampler_of_ones_own_keeps_the_contract(loaded, small, sampling):
    model, tokenizer = loaded
    own = Sampler(model, tokenizer)
    sampler = my_sampler.Generate(
        small, tokenizer, torch.float32, sampling, stop_ids=own.stop_ids, longest=99, seed=0)
    model.to(sampler.model.device)
    prompts = tokenizer(["1+2+3+4+5=?", "9-8=?", "7+8-3=?"]).input_ids
    drawn = sampler.sample(prompts, 4, sampling, seed=5)
    rows = [prompt for prompt in prompts for _ in range(4)]
    logp = completion_logprobs(
        model, rows, drawn.tokens, drawn.mask.cpu(), temperature=sampling.temperature or 1.0)
    torch.testing.assert_close(logp, drawn.logp, rtol=0, atol=1e-4)
    assert drawn.mask.sum(1).tolist() == drawn.lengths.tolist()
    if sampling.temperature == 0:
        assert torch.equal(drawn.tokens, own.sample(prompts, 4, sampling, 5).tokens)
    # the same, whichever rank has the question
    alone = sampler.sample(prompts[1:2], 4, sampling, seed=5, places=[1])
    n = alone.tokens.shape[1]
    assert torch.equal(alone.tokens, drawn.tokens[4:8, :n]) and not drawn.mask[4:8, n:].any()
    assert len(sampler.sample([], 4, sampling, 5).tokens) == 0
