"""CISPO, SAPO, RLOO and Lite PPO beside TRL's own trainers. Needs TRL: `bash examples/test_in.sh
trl` makes an environment with it."""

import pytest
import torch
from datasets import Dataset

from engine.tasks.toy_model import make_model, make_tokenizer
from family.cispo import cispo_loss
from family.lite_ppo import batch_std_advantages
from family.rloo import leave_one_out_advantages
from family.sapo import sapo_loss
from grpo import grpo_loss

trl = pytest.importorskip("trl", reason="TRL is not installed: bash examples/test_in.sh trl")
from tests.test_cppo_in_trl import gradients  # noqa: E402

G, QUESTIONS = 8, [f"{a}+{b}=?" for a in range(4) for b in range(4)]


def trained(trainer, config, folder, mu=1, **options):
    """(trainer after its first batch of completions, inputs of each loss, rewards (Q, G))."""
    rewards, tokenizer = [], make_tokenizer()

    def digits(completions, **columns):
        rewards.extend(float(sum(c.isdigit() for c in text)) for text in completions)
        return rewards[-len(completions) :]

    torch.manual_seed(0)
    make_model(tokenizer).save_pretrained(folder)
    config = config(**{
        "output_dir": str(folder), "model_init_kwargs": {"dtype": "float32"}, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "disable_dropout": True,
        "dataloader_pin_memory": False, "report_to": "none", "per_device_train_batch_size": 2 * G,
        "num_generations": G, "max_completion_length": 12, "num_iterations": mu, "max_steps": mu,
        "beta": 0.0, "max_grad_norm": 0.0, "learning_rate": 1e-2, "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "seed": 1,
    } | options)  # fmt: skip
    rows = Dataset.from_list([{"prompt": q} for q in QUESTIONS])
    trainer = trainer(str(folder), digits, config, rows, processing_class=tokenizer)
    inputs, compute = [], trainer.compute_loss
    trainer.compute_loss = lambda model, batch, *a, **k: (
        inputs.append(batch) or compute(model, batch, *a, **k))
    trainer.train()
    return trainer, inputs, torch.tensor(rewards).view(-1, G)


@pytest.mark.parametrize("name, ours, options", [
    ("cispo", cispo_loss, {"epsilon_high": 5.0}),  # TRL's is the largest ratio itself
    ("cispo", lambda *x: cispo_loss(*x, clip_high=0.05), {"epsilon_high": 1.05}),
    ("sapo", sapo_loss, {}),
], ids=["cispo", "cispo, clipped", "sapo"])  # fmt: skip
def test_the_second_update_has_the_gradient_of_trl(name, ours, options, tmp_path):
    trainer, inputs, _ = trained(
        trl.GRPOTrainer, trl.GRPOConfig, tmp_path, mu=3, loss_type=name, **options)
    batch, ratios = inputs[-1], []

    def loss(logp, mask):
        value, stats = ours(logp, batch["old_per_token_logps"], batch["advantages"], mask)
        ratios.append(stats["ratio_max"].item())
        return value

    theirs, mine = gradients(trainer, batch, loss)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert ratios[0] > 1.06 and mine.norm() > 1e-3


def test_lite_ppos_advantages_are_those_of_trl(tmp_path):
    """TRL shuffles the completions of a batch, so both are sorted."""
    _, inputs, rewards = trained(
        trl.GRPOTrainer, trl.GRPOConfig, tmp_path, scale_rewards="batch", loss_type="dapo")
    ours = batch_std_advantages(rewards).flatten().sort().values
    torch.testing.assert_close(inputs[0]["advantages"].sort().values, ours, rtol=0, atol=1e-6)
    assert ours.unique().numel() > 2


def test_rloos_advantages_and_first_gradient_are_those_of_trl(tmp_path):
    """TRL has one ratio for each completion, which is 1 in the first update: the gradient is the
    sum over its tokens."""
    trainer, inputs, rewards = trained(trl.RLOOTrainer, trl.RLOOConfig, tmp_path, learning_rate=0.0)
    batch = inputs[0]
    ours = leave_one_out_advantages(rewards).flatten().sort().values
    torch.testing.assert_close(batch["advantages"].sort().values, ours, rtol=0, atol=1e-6)
    theirs, mine = gradients(trainer, batch, lambda logp, mask: grpo_loss(
        logp, logp.detach(), batch["advantages"], mask, beta=0.0, weights=mask / len(mask))[0])
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
