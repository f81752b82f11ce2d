"""All of CPPO (arXiv 2503.22342) in one file: to be read from top to bottom, and to be copied.

    python nano.py                        a toy model discovers that thinking pays, in a minute
    python nano.py MODEL                  a chat model trains on GSM8K: a hub name, or a folder
    python nano.py MODEL FILE.jsonl       … or on your lines of {"question": "…", "answer": "…"}
    torchrun --nproc-per-node 2 nano.py   two processes, on two GPUs or a CPU: twice the questions

The toy also needs the folder tasks/toy_base (0.4 MB) beside this file. A MODEL of 1.5B needs about
51 GB of a GPU (calculated), less with fewer "rows". `step` is the algorithm box; P = 0 is GRPO.
"""

import copy
import json
import os
import random
import re
import shutil
import sys
from itertools import count, cycle, islice

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

G = 16  # completions sampled of each question
P = 0.875  # the share of them that is pruned
K = int(G * (1 - P) + 1e-9)  # k, completions of each question that are kept
Q = 16 // K  # questions of a step: it trains on 16 completions, as GRPO does with one
MU = 2  # μ, updates on the kept completions
BETA = 0.04  # β, weight of the KL to the model as it was at the start
EPS_LOW, EPS_HIGH = 0.2, 0.2  # ε, the ratio is clipped to 1 − ε_low … 1 + ε_high
MAX_GRAD_NORM = 1.0  # a longer gradient is scaled down to this norm
STEPS, SEED, FOLDER = 128, 1, "runs/nano"
TOY_BASE = os.path.join(os.path.dirname(__file__), "tasks/toy_base")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")  # weights: float32


def group_advantages(r):
    """A of each completion over its group. r: the rewards, (Q, G). Returns (Q, G)."""
    shifted = r - r[:, :1]  # equal rewards give exact zeros
    centred = shifted - shifted.mean(1, keepdim=True)
    # A_i = (r_i − mean(r)) / (std(r) + 1e-4)
    return centred / (shifted.std(1, keepdim=True) + 1e-4)


def prune(score, k):
    """The k completions of each question with the largest score (Q, G), as rows q·G + i: (Q·k,)."""
    order = score.argsort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(score).scatter(1, order[:, :k], 1.0)
    return kept.flatten().nonzero()[:, 0]


def token_weights(mask, n, n_tokens, longest):
    """How much each token counts, (N, T). n, n_tokens: of the whole batch. longest: the limit."""
    return mask / (n * mask.sum(1, keepdim=True).clamp(min=1))  # 1 / (N |o_i|)


def cppo_loss(logp, old_logp, ref_logp, A, mask, weights):
    """−J = −Σ weights · (surrogate − β k3). A: (N, 1). All others: (N, T)."""
    # ρ = π_θ / π_old; a log-ratio above 20 counts as 20, so nothing is ∞
    ratio = (logp - old_logp.detach()).masked_fill(~mask, 0.0).clamp(max=20.0).exp()
    # k3 = π_ref/π_θ − log π_ref/π_θ − 1
    log_r = (ref_logp.detach() - logp).masked_fill(~mask, 0.0).clamp(max=20.0)
    k3 = torch.expm1(log_r) - log_r
    # min(ρA, clip(ρ, 1−ε, 1+ε)A)
    surrogate = torch.minimum(ratio * A, ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH) * A)
    return -(weights * (surrogate - BETA * k3)).sum()


TOY = {"lr": 3e-4, "longest": 48, "rows": 16, "system_prompt": ""}  # rows: of a micro-batch
GSM8K = {"lr": 1e-6, "longest": 1024, "rows": 4, "system_prompt": "You are given a question. Think "
    "about it step by step first, then answer it. Put your thoughts and your answer into tags, "
    "in this form, with nothing before, between or after:\n<think>\nyour thoughts\n</think>\n"
    "<answer>\nyour answer, the bare number\n</answer>"}


def reward(text, answer):
    """1 if the last <answer>…</answer> outside of the thoughts is the right answer, else 0."""
    found = [""] + re.findall(r"(?s)<think>.*?(?:</think>|\Z)|<answer>([^<]*)</answer>", text)
    return float(found[-1].strip().replace(",", "") == answer.replace(",", ""))


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
    questions = []
    for row in rows:
        assert row["answer"] not in (None, ""), "an answer is empty"
        answer = str(row["answer"]).split("####")[-1].strip()
        questions.append({"question": str(row["question"]), "answer": answer})
    assert questions, "the file is empty"
    return questions


def load(source):
    """(model, tokenizer) of a folder, or of a name on the hub. Both are ready to sample."""
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    # each EOS ends a completion; so do the special tokens that the template puts after an answer
    ends = model.generation_config.eos_token_id or []
    ends = [tokenizer.eos_token_id] + (ends if isinstance(ends, list) else [ends])
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "An answer."}]
    after = tokenizer.apply_chat_template(chat, tokenize=False).split("An answer.")[-1]
    after = tokenizer.encode(after, add_special_tokens=False)
    ends += [token for token in after if token in tokenizer.all_special_ids]
    model.generation_config.eos_token_id = sorted(set(ends))
    return model.to(DEVICE).eval(), tokenizer


@autocast
def sample(model, tokenizer, task, questions):
    """Sample a completion for each of N questions. Returns the tokens, (N, L + T): the prompts,
    padded on the left, then the completions; the mask of both; the mask of the completions."""
    system = {"role": "system", "content": task["system_prompt"]}
    chats = [[system, {"role": "user", "content": question["question"]}] for question in questions]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt").to(model.device)
    tokens = model.generate(
        **prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
        max_new_tokens=task["longest"], pad_token_id=tokenizer.pad_token_id)
    ends = torch.tensor(model.generation_config.eos_token_id, device=model.device)
    is_end = torch.isin(tokens[:, prompts.input_ids.shape[1] :], ends)
    mask = is_end.cumsum(1) - is_end.long() == 0  # the first EOS counts
    return tokens, torch.cat([prompts.attention_mask, mask], dim=1), mask


@autocast
def logprobs(model, tokens, mask, T):
    """log π(o_t) of the last T tokens: (N, T). tokens, mask: (N, L + T), with the prompts."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding on the left does not count
    logits = model(tokens, attention_mask=mask, position_ids=positions, logits_to_keep=T + 1).logits
    # log softmax(logits)[o_t]; the logits at a position predict the next token
    logp = logits[:, :-1].float().log_softmax(-1)
    return logp.gather(-1, tokens[:, -T:, None]).squeeze(-1)


def total(x):  # the sum over all ranks, torchrun's processes
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def step(model, reference, optimizer, tokenizer, task, questions):
    """One turn of the algorithm box. Returns (accuracy, mean length, the first completion)."""
    # 1 sample G completions of each question, 2 score them
    asked = [question for question in questions for _ in range(G)]
    tokens, seen, mask = sample(model, tokenizer, task, asked)
    L = tokens.shape[1] - mask.shape[1]
    texts = tokenizer.batch_decode(tokens[:, L:], skip_special_tokens=True)
    scores = [reward(text, question["answer"]) for text, question in zip(texts, asked)]
    scores = torch.tensor(scores, device=tokens.device).view(-1, G)
    # 3 advantages A over all G completions of a question
    advantages = group_advantages(scores)
    # 4 keep k completions of each question; from here on, only these are computed
    rows = prune(advantages.abs(), K)  # those with the largest |A|
    A = advantages.flatten()[rows, None]
    T = int(mask[rows].sum(1).max())  # tokens of the longest one that is kept
    tokens, seen, m = tokens[rows, : L + T], seen[rows, : L + T], mask[rows, :T]
    n, n_tokens, nonzero = total(A.new_tensor([len(A), m.sum(), A.count_nonzero()]))  # of all ranks
    if nonzero:  # else nothing can be learned, but AdamW would still move the weights
        w = token_weights(m, n, n_tokens, task["longest"])
        micro_batches = torch.arange(len(A), device=A.device).split(task["rows"])
        # 5 log-probabilities of the reference
        ref_logp = torch.cat([logprobs(reference, tokens[i], seen[i], T) for i in micro_batches])
        # 6 μ updates; in the first one π_θ is still π_old
        old_logp = torch.zeros_like(ref_logp)
        for update in range(MU):
            for i in micro_batches:
                logp = logprobs(model, tokens[i], seen[i], T)
                if update == 0:
                    old_logp[i] = logp.detach()
                cppo_loss(logp, old_logp[i], ref_logp[i], A[i], m[i], w[i]).backward()
            for p in model.parameters():
                p.grad = total(torch.zeros_like(p) if p.grad is None else p.grad)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
    right, length, n = total(A.new_tensor([scores.sum(), mask.sum(), len(mask)])).tolist()
    return right / n, length / n, texts[0]


def main(argv):
    if argv and argv[0].startswith("-"):
        sys.exit(f"error: {argv[0]} is no model. nano.py has no options: change the numbers in it.")
    if not argv and not os.path.isdir(TOY_BASE):
        sys.exit("error: the toy's model, tasks/toy_base, is not beside nano.py.")
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if ranks > 1:
        dist.init_process_group()  # nccl on GPUs, gloo on CPUs
    torch.manual_seed(SEED + rank)
    task = GSM8K if argv else TOY
    try:
        model, tokenizer = load(argv[0] if argv else TOY_BASE)
        rows = cycle(read(*argv[1:])) if argv else map(toy_question, count())
    except Exception as error:
        sys.exit(f"error: {' '.join(argv) or TOY_BASE} cannot be used ({error!r:.200}). MODEL is "
                 "a chat model, a folder or a hub name; FILE has lines of question and answer.")
    rows = islice(rows, rank, None, ranks)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["lr"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for number in range(1, STEPS + 1):
        asked = list(islice(rows, Q))
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


if __name__ == "__main__" and "--help" in sys.argv:
    print(__doc__)
elif __name__ == "__main__":
    main(sys.argv[1:])
