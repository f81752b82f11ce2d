"""simple_GRPO (lsdefine; Apache 2.0), commit 4ab94c6 of 5 August 2025:
git clone https://github.com/lsdefine/simple_GRPO; then --path simple_GRPO

The loss is GRPO_step of grpo_vllm_one.py, the log-probabilities its get_per_token_logps. The clip
range and beta are constants of the file, which are set for each call.

It only renames and reshapes: a token is put before each completion, and our mask becomes token ids,
1, and padding, 0, from which GRPO_step makes its own mask; the old and the reference
log-probabilities carry no gradient, because they come from other processes.
Left out: the temperature, because it samples at 0.9 and no function that scores takes one; the
advantages (a line inside gen_worker, which starts vLLM), the KL and the clip (lines of the loss);
logits in bfloat16, because it computes in their dtype. The model, the tokenizer and packages that
none of these use get stand-ins.

grpo_loss is that of a model whose padding is not its EOS. With DEFAULTS=1 in front of the command
it is that of the file's own model, Qwen2.5-7B, which ends a completion with its padding token; a
completion of that token alone is left out.
"""

import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from torch.nn.functional import pad

UNUSED = ("requests", "tqdm", "transformers")
with patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}):
    import grpo_vllm_one as simple


def token_logprobs(logits, tokens):
    if logits.dtype == torch.bfloat16:
        raise NotImplementedError("it computes in the dtype of the logits")
    return simple.get_per_token_logps(logits, tokens)


def grpo_loss(logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.04, clip_low=0.2):
    if advantages.dim() == 2:
        raise NotImplementedError("it takes one advantage for each completion")
    simple.tokenizer = SimpleNamespace(pad_token_id=0)
    simple.engine = MagicMock(device="cpu")
    simple.clip_param, simple.beta = clip_low, 0.0 if ref_logp is None else beta
    ids = mask.long()
    if "DEFAULTS" in os.environ:
        if (ids.sum(1) < 2).any():
            raise NotImplementedError("without its EOS a completion would be empty: 0/0")
        ids = pad(ids[:, 1:], (0, 1))  # the last token is the EOS, which is the padding
    batch = {
        "plen": 1, "inputs": pad(ids, (1, 0)), "rewards": advantages,
        "refs": (logp if ref_logp is None else ref_logp).detach(), "gen_logps": old_logp.detach()}
    with patch.object(simple, "get_per_token_logps", lambda *_: logp):
        return simple.GRPO_step(batch)
