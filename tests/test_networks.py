"""The networks of a run: adapters, gradient checkpointing, the sampler's copy, and memory that runs out."""

import pytest
import torch
from test_train import completions, config

from engine import critic as critic_module
from engine import data, logs, policy, rollout
from engine import networks as networks_module
from engine.config import check
from engine.networks import add_adapter, around
from engine.options import UserError
from engine.policy import Batch
from engine.rollout import Own, Sampling
from engine.update import update
from train import ALGORITHMS, main

CPU = torch.device("cpu")


def changed(model, before):
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def test_only_the_adapter_learns_and_the_reference_is_the_model_without_it(loaded):
    model, tokenizer = loaded
    batch = completions(tokenizer)
    base = batch.logprobs(model, 1.0).detach()
    c = config(algorithm="grpo", lora=4, lr=1e-2)
    add_adapter(model, 4)
    networks = around(model, tokenizer, c)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update(model, networks.optimizer, [[batch]], ALGORITHMS["grpo"], c)
    assert changed(model, before) and all("lora_" in name for name in changed(model, before))
    assert not torch.allclose(batch.logprobs(model, 1.0), base)
    torch.testing.assert_close(batch.logprobs(networks.reference, 1.0), base)
    assert not torch.allclose(batch.logprobs(model, 1.0), base)  # the adapter is on again


def test_a_run_with_adapters_is_saved_as_adapter_and_resumed(small, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"question": "1+2=?", "answer": "3"}\n' * 4)
    argv = ["--model", small, "--dataset", str(tmp_path / "x.jsonl"), "--output_dir", str(tmp_path / "run"), "--lora", "4", "--lr", "1e-2",
            "--group_size", "8", "--max_new_tokens", "40", "--algorithm", "grpo", "--rewards", "soft_format_reward"]
    for more in (["--steps", "2"], ["--steps", "3", "--resume", "--merge_lora"]):
        assert main([*argv, *more]) == 0
    folder = tmp_path / "run/checkpoint-000003"
    assert (folder / "adapter_model.safetensors").exists() and not (folder / "model.safetensors").exists()
    adapted, tokenizer = policy.load(str(tmp_path / "run"), CPU)
    assert adapted.active_adapters()
    merged, base, batch = policy.load(str(tmp_path / "run/merged"), CPU)[0], policy.load(small, CPU)[0], completions(tokenizer)
    assert [name for name, _ in merged.named_parameters()] == [name for name, _ in base.named_parameters()]
    torch.testing.assert_close(batch.logprobs(merged, 1.0), batch.logprobs(adapted, 1.0))
    assert not torch.allclose(batch.logprobs(merged, 1.0), batch.logprobs(base, 1.0), atol=1e-3)


def test_gradient_checkpointing_gives_the_same_gradients(loaded):
    model, tokenizer = loaded
    batch, gradients = completions(tokenizer), []
    for _ in range(2):
        batch.logprobs(model, 1.0).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(*gradients) and not any(module.training for module in model.modules())


def test_the_copy_samples_what_the_policy_has_become_only_after_a_refresh(loaded):
    model, tokenizer = loaded
    prompts = [q["prompt"] for q in data.load("toy", tokenizer, limit=3)[0]]
    copy, own = Own(model, tokenizer, copy=True), Own(model, tokenizer)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    drawn = [sampler.sample(prompts, 4, Sampling(12), 1).logp for sampler in (copy, own)]
    assert drawn[0].shape != drawn[1].shape or not torch.allclose(*drawn)
    copy.refresh(model.named_parameters())
    assert torch.equal(copy.sample(prompts, 4, Sampling(12), 1).tokens, own.sample(prompts, 4, Sampling(12), 1).tokens)


def test_where_memory_runs_out_the_update_is_made_in_smaller_parts(small, monkeypatch):
    real, weights, rows = Batch.logprobs, [], []
    for limit in (6, 3):
        def logprobs(self, *args, limit=limit, **options):
            rows.append(len(self.prompts))
            if len(self.prompts) > limit:
                raise torch.OutOfMemoryError("out of memory")
            return real(self, *args, **options)

        monkeypatch.setattr(Batch, "logprobs", logprobs)
        model, tokenizer = policy.load(small, CPU)
        c = config(algorithm="grpo", mu=2, beta=0.0, micro_batch_tokens=96)
        update(model, torch.optim.SGD(model.parameters(), lr=0.5), [completions(tokenizer).cut_into(96)], ALGORITHMS["grpo"], c)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
    assert max(rows) == 6 and c.micro_batch_tokens == 48
    with pytest.raises(torch.OutOfMemoryError):  # once
        monkeypatch.setattr(Batch, "logprobs", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
        update(model, torch.optim.SGD(model.parameters(), lr=0.5), [completions(tokenizer).cut_into(96)], ALGORITHMS["grpo"], c)


@pytest.mark.parametrize("options", [["--algorithm", "cppo"], ["--algorithm", "ppo"], ["--lora", "4", "--gradient_checkpointing"]])
def test_bfloat16_as_on_a_gpu(small, tmp_path, monkeypatch, options):
    """Autocast over float32 weights, frozen ones and the sampler's in bfloat16. The two arithmetics agree but for its rounding."""
    for module in (policy, rollout, networks_module, critic_module):
        for name, ours in (("compute_dtype", lambda _: torch.bfloat16), ("autocast", lambda _: torch.autocast("cpu", torch.bfloat16))):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, ours)
    if "--lora" not in options:
        monkeypatch.setattr(networks_module, "Own", lambda model, tokenizer, copy: Own(model, tokenizer, True))
    assert main(["--model", small, "--output_dir", str(tmp_path / "run"), "--questions_per_step", "4", "--group_size", "8", "--steps", "4",
                 "--max_new_tokens", "24", "--lr", "1e-3", "--eval_questions", "8", *options]) == 0
    rows = [row for row in logs.read(tmp_path / "run/metrics.jsonl") if row["loss"] is not None]
    assert rows and not any(row["skipped_updates"] for row in rows)
    assert all(1e-5 < row["sampler_gap"] < 0.02 and row["sampler_gap_max"] < 0.3 for row in rows)


@pytest.mark.parametrize("options, message", [
    ({"shard": "half"}, "--shard must be none or full"),
    ({"shard": "full", "lora": 4}, "--lora cannot be combined with --shard full"),
    ({"lora": 4, "refresh_reference": 2}, "--lora cannot be combined with --refresh_reference"),
])  # fmt: skip
def test_what_does_not_fit_together_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        check(config(**options), ALGORITHMS)
