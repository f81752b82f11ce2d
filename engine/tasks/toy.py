"""The embedded default: a model that learns to think, in minutes, on one CPU core and without a download.

The task is mental arithmetic over five digits, `7+8-3+9-2=?`. The warm start is supervised and messy on purpose: some
of its demonstrations think step by step,

    <think>7+8=15;15-3=12;12+9=21;21-2=19;</think>
    <answer>19</answer>

and most just guess, `<answer>19</answer>`, half of them a little off. So the base model mostly guesses, and is mostly
wrong. Nobody tells it to think: reinforcement learning finds out that thinking pays, and accuracy and length rise together.
"""

import hashlib
import os
import random
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from allocate import micro_batches
from engine.model.policy import completion_logprobs
from engine.run import distributed

OPERANDS = 5
THINKING_SHARE = 0.3  # of the warm start's demonstrations
WRONG_SHARE = 0.5  # of those that guess
MAX_NEW_TOKENS = 48  # the longest thoughts need 39
WORDY = 8
TRAIN_QUESTIONS = 2048  # one epoch of the training script
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CODE_TAGS = ["```python", "```", "print(", ")"]
VOCABULARY = ["<pad>", "<eos>", *TAGS, *"0123456789+-=?;Ċ"]  # Ċ is how byte-level vocabularies write a newline


def make_tokenizer(kind="base"):
    """Qwen2's tokenizer with a vocabulary of characters and no merges: one token per character, and one per tag.

    Its chat template is the bare question. kind: see `demonstration`.
    """
    tags = TAGS + CODE_TAGS if kind == "code" else TAGS
    vocabulary = VOCABULARY + [tag for tag in tags if tag not in VOCABULARY]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], unk_token="<pad>", pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])  # read as a whole, shown as text
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    return tokenizer


def question(index, split="train"):
    """Question number `index` of an endless supply, as columns: question, answer, and the thoughts that lead there.

    `split` is train, test or warm_start. No question of the test split is ever one of the others.
    No running total is negative.
    """
    draw = random.Random(f"{split} {index}")
    while True:
        total = draw.randint(1, 9)
        text, thoughts = str(total), ""
        for _ in range(OPERANDS - 1):
            digit = draw.randint(1, 9)
            sign = "-" if digit <= total and draw.random() < 0.5 else "+"
            result = total + digit if sign == "+" else total - digit
            thoughts += f"{total}{sign}{digit}={result};"
            text += f"{sign}{digit}"
            total = result
        # a tenth of all questions, told by their text alone, is held out
        held_out = random.Random(text).random() < 0.1
        if held_out == (split == "test"):
            return {"question": f"{text}=?", "answer": str(total), "thoughts": thoughts}


def demonstration(index, kind="base"):
    """(question, completion) number `index` of the warm start: some think and are right, most guess, and often wrongly.

    kind "code": the answer is a program that prints it. Some let Python calculate, most print a guess. kind "wordy": all of
    them think, and say the last total up to WORDY times more, which does neither good nor harm.
    """
    row, draw = question(index, "warm_start"), random.Random(f"demonstration {index}")
    answer, thoughts, thinks = int(row["answer"]), row["thoughts"], kind == "wordy" or draw.random() < THINKING_SHARE
    if not thinks and draw.random() < WRONG_SHARE:
        answer += draw.choice([off for off in (-3, -2, -1, 1, 2, 3) if answer + off >= 0])
    if kind == "code":
        return row["question"], f"<think></think>\n```python\nprint({row['question'].removesuffix('=?') if thinks else answer})\n```"
    if kind == "wordy":
        thoughts += f"{answer};" * draw.randint(0, WORDY)
    return row["question"], (f"<think>{thoughts}</think>\n" if thinks else "") + f"<answer>{answer}</answer>"


def make_model(tokenizer):
    """A Qwen2 of about 109,000 parameters with random weights."""
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def warm_start(model, tokenizer, *, kind="base", steps=800, batch_size=64, lr=5e-3):
    """Supervised training on the demonstrations: cross-entropy on the completion's tokens, EOS included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in trange(steps, desc="warm start", leave=False):
        demonstrations = [demonstration(i, kind) for i in range(step * batch_size, (step + 1) * batch_size)]
        prompts = tokenizer([prompt for prompt, _ in demonstrations]).input_ids
        completions = tokenizer([completion + tokenizer.eos_token for _, completion in demonstrations]).input_ids
        total = sum(map(len, completions))
        for batch in micro_batches([len(p) + len(c) for p, c in zip(prompts, completions)], 1024):
            lengths = torch.tensor([len(completions[i]) for i in batch])
            tokens = pad_sequence([torch.tensor(completions[i]) for i in batch], batch_first=True)
            logp = completion_logprobs(model, [prompts[i] for i in batch], tokens, lengths)
            loss = -logp.sum() / total  # the mean over all tokens of the step
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def base(kind="base"):
    """The folder of the toy's base model, made on first use (about half a minute) and kept under runs/.

    Its name holds a fingerprint of this file: whoever changes the toy gets a new base. kind: of its demonstrations.
    """
    fingerprint = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = Path("runs") / f"toy-{kind}-{fingerprint}"
    if distributed.rank() == 0 and not folder.exists():
        torch.set_num_threads(1)
        torch.manual_seed(0)
        tokenizer = make_tokenizer(kind)
        model = make_model(tokenizer)
        warm_start(model, tokenizer, kind=kind)
        unfinished = Path(f"{folder}.{os.getpid()}")
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if not folder.exists():  # another run may have been faster
            unfinished.rename(folder)
    distributed.barrier()
    return str(folder)


def source(model, dataset):
    """The folder or hub name of the model that `--model` names: `toy` is the base model of that toy."""
    return model if model != "toy" else base("code" if dataset == "toy_code" else "base")
