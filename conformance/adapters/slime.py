"""slime (THUDM; Apache 2.0), commit 624b824 of 21 August 2026:
git clone https://github.com/THUDM/slime; then --path slime

All are functions of slime/utils/ppo_utils.py: the KL estimators (compute_approx_kl) and gae
(get_advantages_and_returns_batch, in chunks).
It only renames and reshapes: gae takes a list of completions, and 0 is filled in on padding.
Left out: compute_policy_loss and compute_gspo_kl, because they take and give log π_old − log π,
which an adapter would have to compute; the losses, because the Megatron backend adds up completions
in policy_loss_function and divides elsewhere; group_advantages, a line of its Ray rollout.
torch.compile and Megatron, which is only asked for its size, get stand-ins.
"""

import sys
from functools import partial
from unittest.mock import MagicMock, patch

import torch

with patch("torch.compile", lambda **_: lambda function: function):
    from slime.utils import ppo_utils

MEGATRON = MagicMock()
MEGATRON.mpu.get_context_parallel_world_size.return_value = 1


kl_k1, kl_k2, kl_k3 = (
    partial(ppo_utils.compute_approx_kl, kl_loss_type=name) for name in ("k1", "k2", "k3"))


def gae(rewards, values, mask, *, gamma=1.0, lam=0.95):
    lengths = mask.sum(1).long().tolist()
    with patch.dict(sys.modules, {"megatron": MagicMock(), "megatron.core": MEGATRON}):
        out = ppo_utils.get_advantages_and_returns_batch(
            lengths, lengths, list(values), list(rewards), gamma, lam)
    pad, T = torch.nn.functional.pad, mask.shape[1]
    return tuple(torch.stack([pad(row, (0, T - len(row))) for row in rows]) for rows in out)
