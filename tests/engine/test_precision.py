"""What arithmetic is done in (`--dtype`)."""

from statistics import fmean

import pytest
import torch
from torch.testing import assert_close

import eval as evaluation
from engine.data.questions import load_questions
from engine.model import decoding, loading, precision
from engine.model.loading import load_model
from engine.model.networks import build, load_policy
from engine.model.precision import choose_dtype
from engine.options.config import config_of
from engine.run import checkpoint
from engine.run.state import State
from experiments.library.toy_model import make_model, make_tokenizer
from tests.helpers.training import CPU, networks_around, stepper, weights_of

F32, BF16 = torch.float32, torch.bfloat16


def number_of_digits(completions, **columns):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


@pytest.fixture
def amx(monkeypatch):
    """As on a CPU with AMX, and as if the toy's model were large."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    monkeypatch.setattr(precision, "TINY", 1000)
    monkeypatch.setattr(loading, "TINY", 1000)


@pytest.mark.parametrize("choice, device, in_hardware, parameters, chosen", [
    ("auto", "cuda", True, 1e3, BF16), ("auto", "cuda", False, 1e9, F32),
    ("float32", "cuda", True, 1e9, F32), ("auto", "cpu", False, 1e9, F32),
    ("auto", "cpu", True, 1e7, BF16), ("auto", "cpu", True, 1e7 - 1, F32),
])  # fmt: skip
def test_the_choice_of_arithmetic(monkeypatch, choice, device, in_hardware, parameters, chosen):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported",
        lambda including_emulation: in_hardware or including_emulation,
    )
    # without AMX, bfloat16 is slower than float32
    capabilities = {"amx_bf16": True} if in_hardware else {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert choose_dtype(choice, torch.device(device), parameters) == chosen


@pytest.mark.parametrize("choice, computed", [("float32", F32), ("bfloat16", BF16), ("auto", BF16)])
def test_all_networks_have_the_dtype_of_the_arithmetic_and_the_optimizer_changes_float32_weights(
    small, amx, choice, computed
):
    policy, tokenizer = load_policy(small, CPU, choice)
    networks = networks_around(policy, tokenizer, lr=1e-3, beta=0.04, critic=True)
    assert networks.sampler.model is policy.model and networks.sampler.dtype == computed
    backbones = policy.model, networks.reference.model, networks.critic.backbone
    assert {p.dtype for network in backbones for p in network.parameters()} == {computed}
    assert policy.dtype == networks.reference.dtype == computed
    learning = [p for group in networks.optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in learning} == {F32} == {networks.critic.head.weight.dtype}
    # of the same parameters: the head of the critic learns where it computes
    assert networks.critic.head is networks.optimized_networks[1].head
    whole = [*policy.model.parameters(), *networks.critic.parameters()]
    assert [p.shape for p in learning] == [p.shape for p in whole]
    buffers = zip(policy.model.buffers(), networks.optimized_networks[0].buffers())
    assert all(torch.equal(buffer, loaded) for buffer, loaded in buffers)  # rotary frequencies
    assert load_model(small, CPU, choice, frozen=True)[0].dtype == computed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_stays_where_the_policy_has_started(small, dtype):
    """Its weights are its own, also if they need no rounding."""
    policy, tokenizer = load_policy(small, CPU, dtype)
    start = weights_of(policy.model).to(policy.dtype)
    networks = networks_around(policy, tokenizer, lr=1e-3, beta=0.04)
    for p in networks.model.parameters():
        p.data.add_(1)
    assert torch.equal(weights_of(networks.reference.model), start)
    assert not any(p.requires_grad for p in networks.reference.model.parameters())


def test_a_frozen_tiny_model_is_not_rounded(small, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    exact, frozen = (load_model(small, CPU, frozen=frozen)[0] for frozen in (False, True))
    assert frozen.dtype == F32 and torch.equal(weights_of(frozen), weights_of(exact))


def test_a_step_in_bfloat16_samples_what_it_scores_and_moves_float32_masters(small):
    """The first ratios are 1, the sampler's rounding is all that lies between it and the policy,
    and lr 1e-6 is not lost. model: the masters."""
    model, tokenizer = load_model(small, CPU, "bfloat16")
    before, (questions, _) = weights_of(model), load_questions("toy", tokenizer, limit=2)
    step = stepper(
        model, tokenizer, questions, [number_of_digits], "grpo", lr=1e-6, beta=0.04, mu=1,
        group_size=8, dtype=BF16,
    )
    metrics, *_ = step()
    assert 0 < metrics["sampler_logp_diff"] < 0.02
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert {p.dtype for p in model.parameters()} == {F32}
    moved = (weights_of(model) - before).abs()
    assert (moved > 0).float().mean() > 0.9 and moved.max() < 3e-6


def test_an_evaluation_computes_as_training_does(small, amx, monkeypatch, tmp_path):
    seen, draw = [], decoding.sample_token
    monkeypatch.setattr(
        decoding, "sample_token",
        lambda logits, *rest: seen.append(logits.dtype) or draw(logits, *rest),
    )
    evaluation.main(f"--model {small} --output_dir {tmp_path} --max_new_tokens 4 --questions 2 "
                    "--samples 0".split())
    assert set(seen) == {BF16}


@pytest.mark.slow
def test_the_scorer_is_nearer_to_the_sampler_than_with_autocast():
    """Both compute with the same bfloat16 weights. With autocast the gap of these models was
    0.046."""
    tokenizer = make_tokenizer()
    questions, _ = load_questions("toy", tokenizer, limit=1)
    gaps = []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        model = make_model(tokenizer, width=256, layers=8).eval()
        step = stepper(
            model, tokenizer, questions, [number_of_digits], "grpo", group_size=8, dtype=BF16,
            max_new_tokens=16)
        gaps.append(step(seed).metrics["sampler_logp_diff"])
    print(f"sampler_logp_diff: {fmean(gaps):.4f}")
    assert 0 < fmean(gaps) < 0.03


def test_gradients_are_added_up_in_float32_and_the_network_becomes_the_rounded_masters(small):
    """Three micro-batches' gradients: their sum in float32 is not what bfloat16 would add up to."""
    policy, tokenizer = load_policy(small, CPU, "bfloat16")
    networks = networks_around(policy, tokenizer, lr=1e-3)
    masters, computing = networks.optimized_networks[0].lm_head.weight, policy.model.lm_head.weight
    terms = 1.0, 1e-3, 2e-3  # bfloat16 has 8 bits, so there 1 + 0.001 is 1
    for term in terms:
        (term * computing.sum()).backward()
        assert computing.grad is None
    rounded = [torch.tensor(term, dtype=BF16).item() for term in terms]
    assert torch.equal(masters.grad, torch.full_like(masters, sum(rounded)))
    networks.step()
    changed = weights_of(networks.optimized_networks[0])
    assert torch.equal(weights_of(policy.model).float(), changed.to(BF16).float())
    networks.zero_grad()
    assert masters.grad is None


@pytest.mark.parametrize("more", [{}, {"algorithm": "ppo", "pruning_rate": 0.0}, {"lora": 2}])
def test_a_checkpoint_holds_the_masters(small, tmp_path, more):
    """Also those of the critic and of adapters: the run goes on with the same float32 weights."""
    config, algorithm = config_of({"dataset": "toy", "model": small, "dtype": "bfloat16"} | more)
    networks = build(config, algorithm, small, CPU)
    learning = [p for group in networks.optimizer.param_groups for p in group["params"]]
    for p in learning:
        p.grad = torch.randn_like(p)
    networks.step()
    assert checkpoint.save(tmp_path, networks, State("", "", 1, step=1))
    folder = checkpoint.path_of(tmp_path, 1)
    again = build(config, algorithm, small, CPU, str(folder))
    checkpoint.restore(folder, again)
    saved, loaded = (each.optimized_networks + each.trained_networks for each in (networks, again))
    for one, other in zip(saved, loaded):
        assert_close(dict(one.named_parameters()), dict(other.named_parameters()), rtol=0, atol=0)
    moments = [list(each.optimizer.state_dict()["state"].values()) for each in (networks, again)]
    assert_close(*moments, rtol=0, atol=0)
