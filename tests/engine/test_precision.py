"""What arithmetic is done in (`--dtype`)."""

import pytest
import torch

import eval as evaluation
from engine.data.questions import load_questions
from engine.model import loading, precision, writing
from engine.model.loading import load_model
from engine.model.networks import load_policy
from engine.model.precision import choose_dtype
from tests.training import CPU, networks_around, stepper, weights_of

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
def test_weights_that_learn_are_float32_and_all_others_have_the_dtype_of_the_arithmetic(
    small, amx, choice, computed
):
    policy, tokenizer = load_policy(small, CPU, choice)
    networks = networks_around(policy, tokenizer, lr=1e-3, beta=0.04, critic=True)
    assert policy.model.dtype == F32 == networks.critic.head.weight.dtype
    assert networks.sampler.model.dtype == networks.sampler.dtype == computed
    assert networks.reference.model.dtype == networks.reference.dtype == computed
    assert policy.dtype == networks.critic.dtype == computed
    assert load_model(small, CPU, choice, frozen=True)[0].dtype == computed


def test_a_frozen_tiny_model_is_not_rounded(small, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    exact, frozen = (load_model(small, CPU, frozen=frozen)[0] for frozen in (False, True))
    assert frozen.dtype == F32 and torch.equal(weights_of(frozen), weights_of(exact))


def test_a_step_in_bfloat16_samples_what_it_scores_and_moves_float32_masters(small):
    """The first ratios are 1, the sampler's rounding is all that lies between it and the policy,
    and lr 1e-6 is not lost."""
    model, tokenizer = load_model(small, CPU, "bfloat16")
    before, (questions, _) = weights_of(model), load_questions("toy", tokenizer, limit=2)
    step = stepper(
        model, tokenizer, questions, [number_of_digits], "grpo", lr=1e-6, beta=0.04, mu=1,
        group_size=8, dtype=BF16,
    )
    metrics, *_ = step()
    assert 0 < metrics["sampler_gap"] < 0.02 and metrics["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert {p.dtype for p in model.parameters()} == {F32}
    moved = (weights_of(model) - before).abs()
    assert (moved > 0).float().mean() > 0.9 and moved.max() < 3e-6


def test_an_evaluation_computes_as_training_does(small, amx, monkeypatch, tmp_path):
    seen, draw = [], writing.sample_token
    monkeypatch.setattr(
        writing, "sample_token",
        lambda logits, *rest: seen.append(logits.dtype) or draw(logits, *rest),
    )
    evaluation.main(f"--model {small} --output_dir {tmp_path} --max_new_tokens 4 --questions 2 "
                    "--samples 0".split())
    assert set(seen) == {BF16}
