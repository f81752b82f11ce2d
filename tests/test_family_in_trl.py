"""CISPO, SAPO, RLOO, Lite PPO, DeepSeek-V3.2 and the importance weights beside TRL's own trainers.
Needs TRL: `bash examples/test_in.sh trl` makes an environment with it. TRL 1.16.0."""

import pytest
import torch

from family.cispo import cispo_loss
from family.deepseek_v32 import deepseek_v32_loss, off_policy_mask
from family.lite_ppo import batch_std_advantages
from family.rloo import leave_one_out_advantages
from family.sapo import sapo_loss
from family.tis import sequence_importance_weights, truncated_importance_weights

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


@pytest.mark.parametrize("threshold", [0.001, 9.0])
def test_deepseeks_third_update_has_the_gradient_of_trl(threshold, tmp_path):
    """With the ratio in the KL term, and with the mask of off-policy negative completions."""
    options = {"loss_type": "grpo", "scale_rewards": "none", "beta": 0.04, "learning_rate": 1e-2,
               "off_policy_mask_threshold": threshold, "use_bias_correction_kl": True}
    trainer, seen = trained(trl.GRPOTrainer, tmp_path, mu=3, options=options), []
    batch = trainer.inputs[-1]

    def loss(logp, mask):
        old = batch["old_per_token_logps"]
        masks = [f(batch["advantages"].unsqueeze(1), logp, old, mask, threshold).bool()
                 for f in (trl.GRPOTrainer.get_off_policy_mask, theirs_and_ours)]
        assert torch.equal(*masks)
        value, stats = deepseek_v32_loss(
            logp, old, batch["advantages"], mask, ref_logp=batch["ref_per_token_logps"], beta=0.04,
            threshold=threshold)
        seen.append(stats)
        return value

    def theirs_and_ours(advantages, logp, sampled, mask, threshold):
        return off_policy_mask(advantages.squeeze(1), logp, sampled, mask, threshold=threshold)

    theirs, mine = gradients(trainer, batch, loss)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert seen[0]["kl"] > 0 and (seen[0]["masked_fraction"] > 0) == (threshold < 1)


class OtherSampler(trl.GRPOTrainer):
    """TRL's trainer with a sampler that says other log-probabilities than the trainer computes."""

    def _generate(self, prompts):
        self.use_vllm = False  # it samples with transformers, and then corrects as for vLLM
        sampled = list(super()._generate(prompts))
        assert sampled[4] is None  # the sampler's log-probabilities
        noise = torch.Generator().manual_seed(3)
        sampled[4] = [(-3.1 + 0.2 * torch.randn(len(row), generator=noise)).tolist()
                      for row in sampled[1]]
        self.use_vllm = True
        return tuple(sampled)


@pytest.mark.parametrize("mode, ours", [
    ("token_truncate", truncated_importance_weights),
    ("token_mask", lambda *x, cap: truncated_importance_weights(*x, cap=cap, low=0.0)),
    ("sequence_truncate", sequence_importance_weights),
    ("sequence_mask", lambda *x, cap: sequence_importance_weights(*x, cap=cap, masked=True)),
])
def test_the_importance_weights_are_those_of_trl(mode, ours, tmp_path):
    options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.1}
    trainer = trained(OtherSampler, tmp_path, options=options)
    batch = trainer.inputs[0]
    theirs, mask = batch["importance_sampling_ratio"], batch["completion_mask"].bool()
    mine = ours(
        batch["old_per_token_logps"], batch["sampling_per_token_logps"], mask, cap=1.1)
    torch.testing.assert_close(mine[mask], theirs.expand(mask.shape)[mask], rtol=1e-5, atol=1e-6)
    end = 0.0 if "mask" in mode else 1.1
    assert 0 < (mine[mask] == end).float().mean() < 1
