"""The embedded default: a model that learns to think, in minutes, on one CPU core and without a download.

The task is mental arithmetic over five digits, `7+8-3+9-2=?`. The warm start is supervised and messy on purpose: some
of its demonstrations think step by step,

    <think>7+8=15;15-3=12;12+9=21;21-2=19;</think>
    <answer>19</answer>

and most just guess, `<answer>19</answer>`. So the base model mostly guesses, and a guess is mostly wrong. Nobody tells it
to think: reinforcement learning finds out that thinking pays, and accuracy and length rise together.
"""

import hashlib
import os
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from allocate import micro_batches
from engine import distributed
from engine.policy import completion_logprobs

OPERANDS = 5
THINKING_SHARE = 0.3  # of the warm start's demonstrations
MAX_NEW_TOKENS = 48  # the longest thoughts need 41
TRAIN_QUESTIONS = 3200  # one epoch of the training script
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
VOCABULARY = ["<pad>", "<eos>", *TAGS, *"0123456789+-=?;\n"]


def make_tokenizer():
    """One token per character, and one per tag; its chat template is the bare question."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(TAGS) + r"|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{{ messages[-1]['content'] }}"
    return fast


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


def demonstration(index, thinking_share=THINKING_SHARE):
    """(question, completion) number `index` of the warm start: some think, most guess."""
    row = question(index, "warm_start")
    answer = f"<answer>{row['answer']}</answer>"
    if random.Random(f"demonstration {index}").random() < thinking_share:
        answer = f"<think>{row['thoughts']}</think>\n{answer}"
    return row["question"], answer


def make_model(tokenizer):
    """A Qwen2 of about 109,000 parameters with random weights."""
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def warm_start(model, tokenizer, *, steps=700, batch_size=64, lr=5e-3):
    """Supervised training on the demonstrations: cross-entropy on the completion's tokens, EOS included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in trange(steps, desc="warm start", leave=False):
        demonstrations = [demonstration(i) for i in range(step * batch_size, (step + 1) * batch_size)]
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


def base():
    """The folder of the toy's base model, made on first use (about half a minute) and kept under runs/.

    Its name holds a fingerprint of this file: whoever changes the toy gets a new base.
    """
    folder = Path("runs") / f"toy-base-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"
    if distributed.rank() == 0 and not folder.exists():
        torch.set_num_threads(1)
        torch.manual_seed(0)
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        warm_start(model, tokenizer)
        unfinished = Path(f"{folder}.{os.getpid()}")
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    distributed.barrier()
    return str(folder)
