"""All of CPPO (arXiv 2503.22342) on one page, to be read from top to bottom.

    python nano.py               a toy model discovers that thinking pays, in a minute or less
    python nano.py MODEL         a chat model learns word problems: a name on the hub, or a folder

transformers samples, the paper's files compute, and `step` is the algorithm box. With P = 0 `step`
is GRPO. train.py makes the same step, and adds what long runs need: logs, checkpoints, several
devices, micro-batches, a faster sampler, log-probabilities in less memory, other algorithms.
"""

import copy
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

import rewards
from cppo import batch_rows, cppo_loss, keep_count, prune
from grpo import group_advantages, token_logprobs
from tasks import toy
from tasks.table import TASKS

G = 16  # completions sampled of each question
P = 0.875  # the share of them that is pruned: k = 2 are kept
Q = 8  # questions of a step: with k = 2 a step trains on 16 completions, as GRPO's 1 question does
MU = 2  # μ, updates on the kept completions
BETA = 0.04  # β, weight of the KL to the model as it was at the start
LONGEST = 1.0  # norm; a longer gradient is scaled down to this norm
STEPS = 128
SEED = 1


def prompts(questions, task, tokenizer):
    """The questions as the model reads them, padded on the left: tokens and mask, both (Q·G, L)."""
    texts = []
    for question in questions:
        turns = [("system", task.system_prompt), *task.examples, ("user", question["question"])]
        chat = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        texts += [text] * G
    read = tokenizer(
        texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    return read.input_ids, read.attention_mask


def sample(model, tokens, mask, longest, tokenizer):
    """Completions of at most `longest` tokens at temperature 1: tokens (Q·G, T) and their mask."""
    whole = model.generate(
        input_ids=tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        repetition_penalty=1.0, max_new_tokens=longest, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id)
    completions = whole[:, tokens.shape[1] :]
    is_eos = completions == tokenizer.eos_token_id
    return completions, is_eos.cumsum(1) - is_eos.long() == 0  # the first EOS counts


def logprobs(model, tokens, mask, T):
    """log π(o_t) of the last T tokens: (N, T). tokens, mask: (N, L + T), with the prompts."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding on the left does not count
    logits = model(tokens, attention_mask=mask, position_ids=positions).logits
    return token_logprobs(logits[:, -T - 1 : -1], tokens[:, -T:], temperature=1.0)


def step(model, reference, optimizer, tokenizer, task, reward, questions):
    """One turn of the algorithm box. Returns (accuracy, mean length, the first completion)."""
    # 1 sample G completions of each question
    asked, asked_mask = prompts(questions, task, tokenizer)
    with torch.no_grad():
        completions, mask = sample(model, asked, asked_mask, task.max_new_tokens, tokenizer)
    # 2 score them
    texts = [tokenizer.decode(o[m], skip_special_tokens=True) for o, m in zip(completions, mask)]
    gold = [question["answer"] for question in questions for _ in range(G)]
    scores = torch.tensor(reward(texts, answer=gold)).view(len(questions), G)
    # 3 advantages A over all G completions of a question
    advantages = group_advantages(scores)
    # 4 keep the k with the largest |A|; from here on, only these are computed
    rows = batch_rows(prune(advantages, keep_count(G, P)), G)
    A, m, T = advantages.flatten()[rows], mask[rows], mask.shape[1]
    whole = torch.cat([asked, completions], dim=1)[rows], torch.cat([asked_mask, mask], dim=1)[rows]
    if A.any():  # else nothing can be learned, but AdamW would still move the weights
        # 5 log-probabilities of the reference
        with torch.no_grad():
            ref_logp = logprobs(reference, *whole, T)
        # 6 μ updates; in the first one π_θ is still π_old
        old_logp = None
        for _ in range(MU):
            logp = logprobs(model, *whole, T)
            old_logp = logp.detach() if old_logp is None else old_logp
            loss, _ = cppo_loss(logp, old_logp, A, m, ref_logp=ref_logp, beta=BETA)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), LONGEST)
            optimizer.step()
    return (scores > 0).float().mean().item(), mask.sum(1).float().mean().item(), texts[0]


def main(argv):
    logging.disable_progress_bar()  # of loading weights
    torch.manual_seed(SEED)
    task = TASKS["arithmetic" if argv else "toy"]
    reward = getattr(rewards, task.rewards[0])
    folder = argv[0] if argv else toy.BASE
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # no dropout
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    questions, lines = task.source("train"), []  # questions without end
    for number in range(1, STEPS + 1):
        asked = [next(questions) for _ in range(Q)]
        accuracy, length, text = step(model, reference, optimizer, tokenizer, task, reward, asked)
        schedule.step()  # the learning rate falls in a line to 0
        lines.append(f"accuracy {accuracy:.2f}   length {length:4.1f}")
        print(f"step {number:3}   {lines[-1]}", flush=True)
    print(f"\nIt learned: {lines[0]}  →  {lines[-1]}", asked[0]["question"], text, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
