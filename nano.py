"""All of CPPO (arXiv 2503.22342) in one file: to be read from top to bottom, and to be copied.

    python nano.py                        a toy model discovers that thinking pays, in a minute
    python nano.py MODEL                  a chat model learns GSM8K: a hub name, or a folder
    python nano.py MODEL FILE.jsonl       … or your lines of {"question": "…", "answer": "…"}
    torchrun --nproc-per-node 2 nano.py   two processes, on two GPUs or a CPU: twice the questions

`step` is the algorithm box. With P = 0 it is GRPO. The trained model is saved in runs/nano.
"""

import copy
import json
import os
import random
import re
import shutil
import sys

import torch
import torch.distributed as dist
from huggingface_hub import model_info, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

G = 16  # completions sampled of each question
P = 0.875  # the share of them that is pruned: k = 2 are kept
Q = 8  # questions of a step: with k = 2 a step trains on 16 completions, as GRPO's 1 question does
MU = 2  # μ, updates on the kept completions
BETA = 0.04  # β, weight of the KL to the model as it was at the start
EPS = 0.2  # ε, the ratio is clipped to 1 − ε … 1 + ε
ROWS = 16  # completions that pass through the model together; fewer need less memory
MAX_GRAD_NORM = 1.0  # a longer gradient is scaled down to this norm
STEPS, SEED, FOLDER = 128, 1, "runs/nano"
TOY_BASE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tasks/toy_base")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")  # weights: float32


def group_advantages(rewards):
    """A of each completion over its group: (Q, G) → (Q, G). Equal rewards give exact zeros."""
    rewards = rewards - rewards[:, :1]
    # A_i = (r_i − mean(r)) / (std(r) + 1e-4)
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def prune(advantages, k):
    """CPPO: the k completions of each question with the largest |A|, as rows q·G + i: (Q·k,)."""
    order = advantages.abs().argsort(dim=1, descending=True, stable=True)
    first = advantages.shape[1] * torch.arange(len(order), device=order.device)
    return (order[:, :k].sort(dim=1).values + first[:, None]).flatten()


def sequence_mean_weights(mask, n):
    """1 / (N |o|) on each token, (N, T). n: N of the whole batch, so gradients only add up."""
    return mask / (n * mask.sum(1, keepdim=True).clamp(min=1))


def cppo_loss(logp, old_logp, ref_logp, A, mask, weights):
    """−J = −Σ weights · (min(ρA, clip(ρ)A) − β k3). A: (N,). All others: (N, T)."""
    # ρ = π_θ / π_old; a log-ratio above 20 counts as 20, so nothing is ∞
    ratio = (logp - old_logp.detach()).masked_fill(~mask, 0.0).clamp(max=20.0).exp()
    # k3 = π_ref/π_θ − log π_ref/π_θ − 1
    log_r = (ref_logp.detach() - logp).masked_fill(~mask, 0.0).clamp(max=20.0)
    k3 = torch.expm1(log_r) - log_r
    # min(ρA, clip(ρ, 1−ε, 1+ε)A)
    surrogate = torch.minimum(ratio * A[:, None], ratio.clamp(1 - EPS, 1 + EPS) * A[:, None])
    return -(weights * (surrogate - BETA * k3)).sum()


TOY = {"lr": 3e-4, "longest": 48, "system_prompt": ""}
GSM8K = {"lr": 1e-6, "longest": 1024, "system_prompt": "You are given a question. Think about it "
    "step by step first, then answer it. Put your thoughts and your answer into tags, in this "
    "form, with nothing before, between or after:\n<think>\nyour thoughts\n</think>\n<answer>\n"
    "your answer, the bare number\n</answer>"}


def reward(text, answer):
    """1 if the last <answer>…</answer> outside of the thoughts is the right answer, else 0."""
    found = re.findall(r"(?s)<think>.*?(?:</think>|\Z)|<answer>\s*([^<]*?)\s*</answer>", text)
    return float([x.replace(",", "") for x in found[-1:]] == [answer.replace(",", "")])


def toy_question(index):
    """Five digits to add and to subtract. A tenth of all such texts is kept for tests."""
    rng, text = random.Random(f"train {index}"), ""
    while not text or random.Random(text).random() < 0.1:
        text = str(rng.randint(1, 9))
        for _ in range(4):
            digit = rng.randint(1, 9)
            sign = "-" if digit <= eval(text) and rng.random() < 0.5 else "+"
            text += f"{sign}{digit}"
    return {"question": f"{text}=?", "answer": str(eval(text))}


def read(file=None):
    """The questions of a file of JSON lines, or of GSM8K, whose answers end in "#### 18"."""
    if file:
        rows = [json.loads(line) for line in open(file, encoding="utf-8") if line.strip()]
    else:
        from datasets import load_dataset
        rows = load_dataset("openai/gsm8k", "main", split="train")
    assert rows and not {None, ""} & {x["answer"] for x in rows}, f"{file} or an answer is empty"
    return [{"question": str(row["question"]),
             "answer": str(row["answer"]).split("####")[-1].strip()} for row in rows]


def load(source):
    """(model, tokenizer) of a folder, or of a name on the hub. Both are ready to sample."""
    if not (os.path.isdir(source) or try_to_load_from_cache(source, "config.json")):
        model_info(source, timeout=10)  # transformers would try for a minute
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.get_chat_template()  # fails if there is none
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model.to(DEVICE).eval(), tokenizer


@autocast
def sample(model, tokenizer, task, questions):
    """Sample a completion for each of N questions. Returns the tokens, (N, L + T): the prompts,
    padded on the left, then the completions; the mask of both; the mask of the completions."""
    system = {"role": "system", "content": task["system_prompt"]}
    chats = [[system, {"role": "user", "content": question["question"]}] for question in questions]
    tokenizer.padding_side = "left"
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt").to(model.device)
    tokens = model.generate(
        input_ids=prompts.input_ids, attention_mask=prompts.attention_mask, do_sample=True,
        temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, max_new_tokens=task["longest"],
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    is_eos = tokens[:, prompts.input_ids.shape[1] :] == tokenizer.eos_token_id
    mask = is_eos.cumsum(1) - is_eos.long() == 0  # the first EOS counts
    return tokens, torch.cat([prompts.attention_mask, mask], dim=1), mask


@autocast
def logprobs(model, tokens, mask, T):
    """log π(o_t) of the last T tokens: (N, T). tokens, mask: (N, L + T), with the prompts."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding on the left does not count
    logits = model(tokens, attention_mask=mask, position_ids=positions).logits[:, -T - 1 : -1]
    # the logits at a position predict the next token: log softmax(logits)[o_t]
    return logits.float().log_softmax(-1).gather(-1, tokens[:, -T:, None]).squeeze(-1)


def total(x):  # the sum over all ranks, torchrun's processes
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def step(model, reference, optimizer, tokenizer, task, questions):
    """One turn of the algorithm box. Returns (accuracy, mean length, the first completion)."""
    # 1 sample G completions of each question, 2 score them
    asked = [question for question in questions for _ in range(G)]
    tokens, seen, mask = sample(model, tokenizer, task, asked)
    T = mask.shape[1]
    texts = [tokenizer.decode(o[m], skip_special_tokens=True) for o, m in zip(tokens[:, -T:], mask)]
    scores = [reward(text, question["answer"]) for text, question in zip(texts, asked)]
    scores = torch.tensor(scores, device=tokens.device).view(-1, G)
    # 3 advantages A over all G completions of a question
    advantages = group_advantages(scores)
    # 4 keep the k with the largest |A|; from here on, only these are computed
    rows = prune(advantages, k=int(G * (1 - P) + 1e-9))
    A, tokens, seen, m = advantages.flatten()[rows], tokens[rows], seen[rows], mask[rows]
    kept, nonzero = total(A.new_tensor([len(A), A.count_nonzero()]))  # of all ranks
    if nonzero:  # else nothing can be learned, but AdamW would still move the weights
        w = sequence_mean_weights(m, kept)
        micro_batches = torch.arange(len(A), device=A.device).split(ROWS)
        # 5 log-probabilities of the reference
        ref_logp = torch.cat([logprobs(reference, tokens[i], seen[i], T) for i in micro_batches])
        # 6 μ updates; in the first one π_θ is still π_old
        old_logp = {}
        for _ in range(MU):
            for i in micro_batches:
                logp = logprobs(model, tokens[i], seen[i], T)
                old = old_logp.setdefault(i, logp.detach())
                cppo_loss(logp, old, ref_logp[i], A[i], m[i], w[i]).backward()
            for p in model.parameters():
                p.grad = total(torch.zeros_like(p) if p.grad is None else p.grad)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
    right, length, n = total(A.new_tensor([(scores > 0).sum(), mask.sum(), len(mask)])).tolist()
    return right / n, length / n, texts[0]


def main(argv):
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if ranks > 1:
        dist.init_process_group()  # nccl on GPUs, gloo on CPUs
    torch.manual_seed(SEED + rank)
    source, *file = argv or [TOY_BASE]
    task = GSM8K if argv else TOY
    try:
        model, tokenizer = load(source)
        rows = read(*file) if argv else [toy_question(i) for i in range(STEPS * Q * ranks)]
    except Exception as error:
        sys.exit(f"error: {' '.join([source, *file])} cannot be used ({error!r:.200}). MODEL is a "
                 "chat model, a folder or a hub name; FILE has lines of question and answer.")
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["lr"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for number in range(1, STEPS + 1):
        asked = [rows[(i * ranks + rank) % len(rows)] for i in range((number - 1) * Q, number * Q)]
        accuracy, length, text = step(model, reference, optimizer, tokenizer, task, asked)
        schedule.step()  # the learning rate falls in a line to 0
        if rank == 0:
            print(f"step {number:3}   accuracy {accuracy:.2f}   length {length:4.1f}", flush=True)
    if rank == 0:
        shutil.rmtree(FOLDER, ignore_errors=True)  # an earlier model, and its scores
        model.save_pretrained(FOLDER)
        tokenizer.save_pretrained(FOLDER)
        print(f"\n{asked[0]['question']}\n{text}\n\nThe model is saved in {FOLDER}.")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(sys.argv[1:])
