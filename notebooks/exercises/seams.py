"""The parts of a training loop in which the pure functions meet a model: most mistakes are here.

    python notebooks/exercises/judge.py notebooks/exercises/mine/notebooks/exercises/seams.py

Prompts are padded on the left and completions on the right. So all completions begin at the same
column, and they are the last T tokens of a row:

    tokens     pad pad 7 + 8 = ? │ 1 5 eos pad        mask      0 0 1 1 1 1 1 │ 1 1 1 0
"""

import torch

import nano
from allocate import micro_batches
from cppo import batch_rows, cppo_loss, keep_count, prune
from grpo import group_advantages, sequence_mean_weights, token_logprobs

MAX_TOKENS = 192  # of a micro-batch


def completion_logits(logits, T):
    """The logits that predict the last T tokens of each row. A model's logits at a position are
    those of the token after it.

    logits: (N, L + T, V), of prompts of L tokens and completions of T. Returns (N, T, V).
    """
    assert logits.shape[1] > T, "logits: (N, L + T, V), with L of at least 1"
    return logits[:, -T - 1 : -1]


def positions(mask):
    """The position of each token in its text: 0 for the first one that is not padding.

    mask: (N, L) int64, 0 on padding. Returns (N, L) int64; on the padding before the text 0 too.
    """
    return (mask.cumsum(1) - 1).clamp(min=0)


def completion_mask(completions, eos):
    """Which tokens are trained on: all up to the first EOS, which counts too.

    completions: (N, T) int64. eos: the id of the EOS token; it may be the padding too. A row
    without an EOS counts whole. Returns (N, T) bool.
    """
    is_eos = (completions == eos).long()
    return is_eos.cumsum(1) - is_eos == 0


def logprobs(model, tokens, mask, T):
    """log π(o_t) of the last T tokens of each row, at temperature 1.

    tokens, mask: (N, L + T), prompts padded on the left, then completions. Returns (N, T).
    """
    logits = model(tokens, attention_mask=mask, position_ids=positions(mask)).logits
    return token_logprobs(completion_logits(logits, T), tokens[:, -T:])


def train_step(model, reference, optimizer, tokenizer, task, questions):
    """One step of CPPO, as `nano.step` makes it on one device. Returns metrics, numbers by name.

    Write it from nano.sample, nano.reward, the functions above and those of the paper, with
    nano.G, P, MU, BETA and MAX_GRAD_NORM. The arguments are those of `nano.step`. The mask of the
    completions is `completion_mask`; of the one that nano.sample returns take only T, its width.
    In each of the μ updates the kept rows go through the model in the parts that
    `micro_batches(lengths, MAX_TOKENS)` gives, and the gradients of the parts add up to that of the
    whole.

    accuracy: share of the scores above 0. length: tokens of a completion. ended: share of the
    completions with an EOS. Of the kept ones, in the first update: logp (mean over the tokens of
    the mask), −A (minus the mean of the advantages), loss, ratio (the largest one).
    """
    asked = [question for question in questions for _ in range(nano.G)]
    tokens, seen, given = nano.sample(model, tokenizer, task, asked)
    T = given.shape[1]
    completions = tokens[:, -T:]
    mask = completion_mask(completions, tokenizer.eos_token_id)
    texts = [tokenizer.decode(o[m], skip_special_tokens=True) for o, m in zip(completions, mask)]
    scores = [nano.reward(text, question["answer"]) for text, question in zip(texts, asked)]
    scores = torch.tensor(scores, device=tokens.device).view(-1, nano.G)
    advantages = group_advantages(scores)
    rows = batch_rows(prune(advantages, keep_count(nano.G, nano.P)), nano.G)
    A, tokens, seen, m = advantages.flatten()[rows], tokens[rows], seen[rows], mask[rows]
    with torch.no_grad():
        old_logp, ref_logp = (logprobs(policy, tokens, seen, T) for policy in (model, reference))
    weights, first = sequence_mean_weights(m), []
    parts = micro_batches(m.sum(1).tolist(), MAX_TOKENS)
    for update in range(nano.MU if A.any() else 0):
        for i in parts:
            loss, stats = cppo_loss(
                logprobs(model, tokens[i], seen[i], T), old_logp[i], A[i], m[i],
                ref_logp=ref_logp[i], beta=nano.BETA, weights=weights[i])
            loss.backward()
            first += [(loss.item(), stats["ratio_max"].item())] if update == 0 else []
        torch.nn.utils.clip_grad_norm_(model.parameters(), nano.MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "accuracy": (scores > 0).float().mean().item(), "length": mask.sum(1).float().mean().item(),
        "ended": (completions == tokenizer.eos_token_id).any(1).float().mean().item(),
        "logp": old_logp[m].mean().item(), "−A": -A.mean().item(),
        "loss": sum(loss for loss, _ in first), "ratio": max(r for _, r in first) if first else 1.0}
