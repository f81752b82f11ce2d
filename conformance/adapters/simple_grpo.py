"""simple_GRPO (lsdefine; Apache 2.0), commit 4ab94c6 of 5 August 2025:
git clone https://github.com/lsdefine/simple_GRPO; then --path simple_GRPO

The loss is GRPO_step of grpo_vllm_one.py, the log-probabilities its get_per_token_logps. The clip
range and beta are constants of the file, which are set for each call.
Left out: the advantages (a line inside gen_worker, which starts vLLM), the KL and the clip (lines
of the loss). The model, the tokenizer and packages that none of these use get stand-ins.
"""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

UNUSED = ("requests", "tqdm", "transformers")
with patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}):
    import grpo_vllm_one as simple


def token_logprobs(logits, tokens, *, temperature=1.0):
    return simple.get_per_token_logps(logits.float() / temperature, tokens)


def grpo_loss(logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.04, clip_low=0.2):
    if advantages.dim() == 2:
        raise NotImplementedError("it takes one advantage for each completion")
    simple.tokenizer = SimpleNamespace(pad_token_id=0)
    simple.engine = MagicMock(device="cpu")
    simple.clip_param, simple.beta = clip_low, 0.0 if ref_logp is None else beta
    batch = {
        "plen": 1, "inputs": torch.nn.functional.pad(mask.long(), (1, 0)), "rewards": advantages,
        "refs": (logp if ref_logp is None else ref_logp).detach(), "gen_logps": old_logp.detach()}
    with patch.object(simple, "get_per_token_logps", lambda *_: logp):
        return simple.GRPO_step(batch)
