"""CISPO, SAPO, RLOO and Lite PPO beside TRL's own trainers. Needs TRL: `bash examples/test_in.sh
trl` makes an environment with it."""

import pytest
import torch

from family.cispo import cispo_loss
from family.lite_ppo import batch_std_advantages
from family.rloo import leave_one_out_advantages
from family.sapo import sapo_loss
from grpo import grpo_loss

trl = pytest.importorskip("trl", reason="TRL is not installed: bash examples/test_in.sh trl")
from tests.test_cppo_in_trl import G, gradients, trained  # noqa: E402


@pytest.mark.parametrize("name, ours, options", [
    ("cispo", cispo_loss, {"epsilon_high": 5.0}),  # TRL's is the largest ratio itself
    ("cispo", lambda *x: cispo_loss(*x, clip_high=0.05), {"epsilon_high": 1.05}),
    ("sapo", sapo_loss, {}),
], ids=["cispo", "cispo, clipped", "sapo"])  # fmt: skip
def test_the_second_update_has_the_gradient_of_trl(name, ours, options, tmp_path):
    options |= {"loss_type": name, "learning_rate": 1e-2}
    trainer, ratios = trained(trl.GRPOTrainer, tmp_path, mu=3, options=options), []
    batch = trainer.inputs[-1]

    def loss(logp, mask):
        value, stats = ours(logp, batch["old_per_token_logps"], batch["advantages"], mask)
        ratios.append(stats["ratio_max"].item())
        return value

    theirs, mine = gradients(trainer, batch, loss)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert ratios[0] > 1.06 and mine.norm() > 1e-3


@pytest.mark.parametrize("kind, advantages, options", [
    (trl.GRPOTrainer, batch_std_advantages, {"scale_rewards": "batch", "loss_type": "dapo"}),
    (trl.RLOOTrainer, leave_one_out_advantages, {}),
], ids=["Lite PPO", "RLOO"])  # fmt: skip
def test_the_advantages_are_those_of_trl(kind, advantages, options, tmp_path):
    """TRL shuffles the completions of a batch, so both are sorted."""
    trainer = trained(kind, tmp_path, options=options)
    theirs = trainer.inputs[0]["advantages"].sort().values
    ours = advantages(torch.tensor(trainer.digits).view(-1, G)).flatten().sort().values
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    assert ours.unique().numel() > 2


def test_rloos_first_gradient_is_that_of_trl(tmp_path):
    """TRL has one ratio for each completion, which is 1 in the first update: the gradient is the
    sum over its tokens."""
    trainer = trained(trl.RLOOTrainer, tmp_path, options={"learning_rate": 0.0})
    batch = trainer.inputs[0]
    theirs, mine = gradients(trainer, batch, lambda logp, mask: grpo_loss(
        logp, logp.detach(), batch["advantages"], mask, beta=0.0, weights=mask / len(mask))[0])
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
