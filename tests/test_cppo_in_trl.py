"""examples/cppo_in_trl.py in TRL itself. Needs TRL: `bash examples/test_in.sh trl` makes an
environment with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from cppo import prune
from engine.tasks.toy_model import make_model, make_tokenizer
from grpo import grpo_loss, token_logprobs

trl = pytest.importorskip("trl", reason="TRL is not installed: bash examples/test_in.sh trl")
from examples import cppo_in_trl  # noqa: E402
from examples.cppo_in_trl import CPPOTrainer  # noqa: E402

ROOT = Path(__file__).parents[1]
G, QUESTIONS = 8, [f"{a}+{b}=?" for a in range(4) for b in range(4)]


def digits(completions, **columns):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


class Norms(TrainerCallback):
    """The length of the gradient before each step of the optimizer."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())


def trained(kind, folder, *, beta=0.04, mu=1, steps=2, options=(), **more):
    """(trainer after two batches of completions, losses, lengths of the gradients, inputs of each
    loss)."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    make_model(tokenizer).save_pretrained(folder)
    config = trl.GRPOConfig(**{
        "output_dir": str(folder), "model_init_kwargs": {"dtype": "float32"}, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "disable_dropout": True,
        "dataloader_pin_memory": False, "report_to": "none", "per_device_train_batch_size": G,
        "gradient_accumulation_steps": 2, "num_generations": G, "max_completion_length": 12,
        "num_iterations": mu, "max_steps": steps * mu, "loss_type": "grpo", "beta": beta,
        "use_bias_correction_kl": False, "max_grad_norm": 0.0, "learning_rate": 1e-3,
        "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "seed": 1,
    } | dict(options))  # fmt: skip
    rows, norms = Dataset.from_list([{"prompt": q} for q in QUESTIONS]), Norms()
    trainer = kind(
        str(folder), digits, config, rows, processing_class=tokenizer, callbacks=[norms], **more
    )
    losses, inputs, compute = [], [], trainer.compute_loss

    def compute_loss(model, batch, *args, **kwargs):
        loss = compute(model, batch, *args, **kwargs)
        losses.append(loss.item())
        inputs.append(batch)
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    return trainer, losses, norms.norms, inputs


@pytest.mark.parametrize("mu", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_without_pruning_it_is_trls_own_trainer(beta, mu, tmp_path):
    _, losses, norms, _ = trained(trl.GRPOTrainer, tmp_path / "a", beta=beta, mu=mu)
    _, ours, our_norms, _ = trained(CPPOTrainer, tmp_path / "b", beta=beta, mu=mu, pruning_rate=0.0)
    assert len(norms) == 2 * mu and min(norms) > 0
    assert ours == pytest.approx(losses, abs=1e-6) and our_norms == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("mu", [1, 2])
def test_a_quarter_is_trained_on_and_nothing_is_computed_for_the_others(mu, tmp_path, monkeypatch):
    advantages, passes = [], {"policy": 0, "reference": 0}

    def recorded(A, k):
        advantages.append(A)
        return prune(A, k)

    def count(name):
        def hook(module, args, kwargs):
            if "labels" in kwargs:  # log-probabilities, not sampling
                passes[name] += len(kwargs["input_ids"])

        return hook

    monkeypatch.setattr(cppo_in_trl, "prune", recorded)
    counted = CPPOTrainer.__init__

    def init(self, *args, **kwargs):
        counted(self, *args, **kwargs)
        self.model.register_forward_pre_hook(count("policy"), with_kwargs=True)
        self.ref_model.register_forward_pre_hook(count("reference"), with_kwargs=True)

    monkeypatch.setattr(CPPOTrainer, "__init__", init)
    _, _, _, inputs = trained(CPPOTrainer, tmp_path, mu=mu, pruning_rate=0.75)
    sampled = sum(A.numel() for A in advantages)
    assert sampled == 2 * 2 * G and {len(batch["advantages"]) for batch in inputs} == {2}
    kept = torch.cat([batch["advantages"] for batch in inputs[:2]]).abs().sort().values
    torch.testing.assert_close(kept, advantages[0].abs().topk(2).values.flatten().sort().values)
    # π_old has a pass of its own if μ > 1; each update has one; the reference one for each batch of
    # completions
    assert passes == {"policy": (mu + (mu > 1)) * sampled // 4, "reference": sampled // 4}
    tokens = sum(batch["completion_mask"].sum() for batch in inputs[:2])
    assert inputs[0]["num_items_in_batch"] == tokens


def gradients(trainer, batch, ours):
    """(TRL's gradient, ours). ours: (logp, mask) → loss."""
    model, T = trainer.model, batch["completion_ids"].shape[1]
    tokens, seen = (
        torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    logits = model(input_ids=tokens, attention_mask=seen).logits[:, -T - 1 : -1]
    logp = token_logprobs(logits, batch["completion_ids"])
    mine = gradient(ours(logp, batch["completion_mask"].bool()))
    theirs = trainer._compute_loss(model, batch) * trainer.current_gradient_accumulation_steps
    return gradient(theirs), mine


def test_the_gradient_is_that_of_grpo_loss_on_the_kept(tmp_path):
    """At TRL's second step, when policy and reference differ."""
    trainer, _, _, inputs = trained(CPPOTrainer, tmp_path, mu=2, pruning_rate=0.75)
    batch, seen = inputs[-1], []

    def loss(logp, mask):
        value, stats = grpo_loss(
            logp, batch["old_per_token_logps"], batch["advantages"], mask,
            ref_logp=batch["ref_per_token_logps"], beta=0.04)
        seen.append(stats)
        return value

    theirs, mine = gradients(trainer, batch, loss)
    assert seen[0]["kl"] > 0 and seen[0]["ratio_max"] != 1
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_kept_rows_that_trl_would_drop_are_refused(tmp_path):
    options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
    with pytest.raises(ValueError, match="4 equal batches"):
        trained(CPPOTrainer, tmp_path, options=options, pruning_rate=0.875)


def two_devices(folder, rows):
    """Called in each of two processes: `rows` completions on a device."""
    options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    _, losses, _, inputs = trained(
        CPPOTrainer, f"{folder}/{os.environ['RANK']}", steps=1, options=options, pruning_rate=0.75
    )
    print(f"\nlosses {losses} rows {[len(batch['advantages']) for batch in inputs]}", flush=True)


@pytest.mark.parametrize("rows, said", [(8, "rows [2]"), (4, "split a group of 8")])
def test_on_two_devices_each_holds_whole_groups(rows, said, tmp_path):
    program = (
        f"from tests.test_cppo_in_trl import two_devices; two_devices({str(tmp_path)!r}, {rows})"
    )
    (tmp_path / "program.py").write_text(program)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        tmp_path / "program.py",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=200,
    )
    assert (done.stdout + done.stderr).count(said) >= 2, done.stderr[-2000:]


def test_adapters_without_a_reference_are_refused(tmp_path):
    from peft import LoraConfig

    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="needs beta=0"):
        trained(CPPOTrainer, tmp_path, peft_config=adapter)
