"""All of CPPO (arXiv 2503.22342) on one page: to be read from top to bottom, and to be copied.

    python nano.py                        a toy model discovers that thinking pays, in a minute
    python nano.py MODEL                  a chat model learns word problems: a hub name, or a folder
    torchrun --nproc-per-node 2 nano.py   two processes, on two GPUs or a CPU: twice the questions

transformers samples, the paper's files compute, and `step` is the algorithm box. With P = 0 `step`
is GRPO. The model is saved in runs/nano. train.py makes the same step, as long runs need it.
"""

import copy
import os
import shutil
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

import rewards
from cppo import batch_rows, cppo_loss, keep_count, prune
from grpo import group_advantages, sequence_mean_weights, token_logprobs
from tasks.table import TASKS

G = 16  # completions sampled of each question
P = 0.875  # the share of them that is pruned: k = 2 are kept
Q = 8  # questions of a step: with k = 2 a step trains on 16 completions, as GRPO's 1 question does
MU = 2  # μ, updates on the kept completions
BETA = 0.04  # β, weight of the KL to the model as it was at the start
ROWS = 16  # completions that pass through the model together; fewer need less memory
MAX_GRAD_NORM = 1.0  # a longer gradient is scaled down to this norm
STEPS = 128
SEED = 1
FOLDER = "runs/nano"  # for the trained model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# a GPU multiplies in bfloat16; the weights stay float32, and each call rounds them anew
autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


def total(x):
    """The sum of a tensor over all ranks, torchrun's processes. It is written into x."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


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


@autocast
def sample(model, tokens, mask, longest, tokenizer):
    """Completions of at most `longest` tokens at temperature 1: tokens (Q·G, T) and their mask."""
    whole = model.generate(
        input_ids=tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        repetition_penalty=1.0, max_new_tokens=longest, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id)
    completions = whole[:, tokens.shape[1] :]
    is_eos = completions == tokenizer.eos_token_id
    return completions, is_eos.cumsum(1) - is_eos.long() == 0  # the first EOS counts


@autocast
def logprobs(model, tokens, mask, T):
    """log π(o_t) of the last T tokens: (N, T). tokens, mask: (N, L + T), with the prompts."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding on the left does not count
    logits = model(tokens, attention_mask=mask, position_ids=positions).logits
    return token_logprobs(logits[:, -T - 1 : -1], tokens[:, -T:], temperature=1.0)


def step(model, reference, optimizer, tokenizer, task, reward, questions):
    """One turn of the algorithm box. Returns (accuracy, mean length, the first completion)."""
    # 1 sample G completions of each question
    asked, asked_mask = (x.to(model.device) for x in prompts(questions, task, tokenizer))
    with torch.no_grad():
        completions, mask = sample(model, asked, asked_mask, task.max_new_tokens, tokenizer)
    # 2 score them
    texts = [tokenizer.decode(o[m], skip_special_tokens=True) for o, m in zip(completions, mask)]
    gold = [question["answer"] for question in questions for _ in range(G)]
    scores = torch.tensor(reward(texts, answer=gold), device=model.device).view(-1, G)
    # 3 advantages A over all G completions of a question
    advantages = group_advantages(scores)
    # 4 keep the k with the largest |A|; from here on, only these are computed
    rows = batch_rows(prune(advantages, keep_count(G, P)), G)
    A, m, T = advantages.flatten()[rows], mask[rows], mask.shape[1]
    whole = torch.cat([asked, completions], dim=1)[rows]
    seen = torch.cat([asked_mask, mask], dim=1)[rows]
    kept, nonzero = total(A.new_tensor([len(A), A.count_nonzero()]))  # of all ranks
    if nonzero:  # else nothing can be learned, but AdamW would still move the weights
        w = sequence_mean_weights(m, num_sequences=kept)  # 1 / (N |o|): gradients only add up
        micro_batches = torch.arange(len(A), device=A.device).split(ROWS)
        # 5 log-probabilities of the reference
        with torch.no_grad():
            ref_logp = torch.cat([logprobs(reference, whole[i], seen[i], T) for i in micro_batches])
        # 6 μ updates; in the first one π_θ is still π_old
        old_logp = torch.zeros_like(ref_logp)
        for update in range(MU):
            for i in micro_batches:
                logp = logprobs(model, whole[i], seen[i], T)
                if update == 0:
                    old_logp[i] = logp.detach()
                loss, _ = cppo_loss(
                    logp, old_logp[i], A[i], m[i], ref_logp=ref_logp[i], beta=BETA, weights=w[i])
                loss.backward()
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
    logging.disable_progress_bar()  # of loading and saving weights
    name, source = ("arithmetic", argv[0]) if argv else ("toy", TASKS["toy"].base)
    task = TASKS[name]
    reward = getattr(rewards, task.rewards[0])
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(DEVICE).eval()
    reference = copy.deepcopy(model)  # both without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    questions, lines = task.source("train"), []  # questions without end
    for number in range(1, STEPS + 1):
        asked = [next(questions) for _ in range(Q * ranks)][rank::ranks]
        accuracy, length, text = step(model, reference, optimizer, tokenizer, task, reward, asked)
        schedule.step()  # the learning rate falls in a line to 0
        lines.append(f"accuracy {accuracy:.2f}   length {length:4.1f}")
        if rank == 0:
            print(f"step {number:3}   {lines[-1]}", flush=True)
    if rank == 0:
        print(f"\nIt learned: {lines[0]}  →  {lines[-1]}", asked[0]["question"], text, sep="\n")
        shutil.rmtree(FOLDER, ignore_errors=True)  # an earlier model, and its scores
        model.save_pretrained(FOLDER)
        tokenizer.save_pretrained(FOLDER)
        print(f"\nSaved. To score it: python eval.py --model {FOLDER} --benchmark {name}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(sys.argv[1:])
