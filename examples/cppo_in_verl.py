"""CPPO in verl 0.9.1: the synchronous trainer, and after the rewards only k completions of each
question stay.

    export VERL_USE_EXTERNAL_MODULES=examples.cppo_in_verl PYTHONPATH=.
    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=cppo \\
        +trainer.v1.cppo.pruning_rate=0.75 algorithm.adv_estimator=grpo \\
        actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
        actor_rollout_ref.rollout.n=16 data.train_batch_size=256 \\
        actor_rollout_ref.actor.ppo_mini_batch_size=64 …

The first line registers the trainer; … stands for your model and your data.

Allocation: GRPO would have 64 for both batch sizes. CPPO keeps k = 4 completions of each of 256
questions: 1,024. That is one of verl's mini-batches: ppo_mini_batch_size · n = 64 · 16.

These methods have run on a CPU with verl's classes. We only read in what order verl calls them. No
training has run.
"""

if __name__ == "__main__":
    print(__doc__)  # it is no program
    raise SystemExit

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.padding import response_to_nested

from cppo import batch_rows, keep_count, prune
from grpo import group_advantages


@register_trainer("cppo")
class CPPOTrainer(PPOTrainerSync):
    def _build_replay_buffer(self):
        self.trainer_mode = "sync"  # another name would get verl's asynchronous buffer
        return super()._build_replay_buffer()

    def _balance_batch(self, batch, metrics, **options):
        """Prune before verl computes the log-probabilities of the old and the reference policy."""
        G, actor = self.config.actor_rollout_ref.rollout.n, self.config.actor_rollout_ref.actor
        k = keep_count(G, self.config.trainer.v1.cppo.pruning_rate)
        # UID_SESSION_INDEX: the completions of a question follow each other
        keys = sorted(batch.keys)
        questions = len(keys) // G
        asked = [key.rsplit("_", 2)[0] for key in keys]
        if len(keys) % G or any(len({*asked[q * G : (q + 1) * G]}) > 1 for q in range(questions)):
            raise ValueError(
                f"CPPO needs {G} completions of each question: a session failed, or has several "
                "outputs."
            )
        if questions * k % (actor.ppo_mini_batch_size * G):
            raise ValueError(
                f"{questions * k} kept completions do not fill mini-batches of ppo_mini_batch_size "
                f"× n = {actor.ppo_mini_batch_size * G}: verl would fill up with empty ones."
            )
        scores = tq.kv_batch_get(
            keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"]
        )["rm_scores"]
        rewards = torch.stack([row.sum() for row in scores.unbind()]).view(questions, G)
        A = group_advantages(
            rewards, divide_by_std=self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
        )
        # the k largest |A| of each question; the advantages are over all G
        rows = batch_rows(prune(A, k), G).tolist()
        self.advantages = {keys[row]: A.flatten()[row] for row in rows}
        tq.kv_clear(
            keys=[key for key in keys if key not in self.advantages],
            partition_id=batch.partition_id,
        )
        return super()._balance_batch(batch.select_keys(list(self.advantages)), metrics, **options)

    def _compute_advantage(self, batch, metrics):
        """verl's would compare the kept with each other: ours take their place."""
        batch = super()._compute_advantage(batch, metrics)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
        )
        mask = data["response_mask"]
        # 0: verl's padding
        A = torch.stack([self.advantages.get(key, torch.zeros(())) for key in batch.keys])
        A = response_to_nested(A[:, None] * data.to_padded_tensor()["response_mask"], mask)
        fields = TensorDict({"advantages": A, "returns": A}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
