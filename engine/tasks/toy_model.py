"""The toy's model: a Qwen2 of 109,000 parameters with a vocabulary of characters, and its warm
start.

The base model is shipped in toy_base/, so that a figure means the same on every machine.

    python -m engine.tasks.toy_model     makes it again, and compares it with the shipped one
"""

import hashlib
import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AddedToken, Qwen2Config, Qwen2Tokenizer
from transformers.utils import logging

from engine.base import progress, ranks
from engine.model.logprobs import completion_logprobs, completion_mask
from engine.tasks import toy
from micro_batches import micro_batches

logging.disable_progress_bar()  # of saving weights

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CODE_TAGS = ["```python", "```", "print(", ")"]
# Ċ is how byte-level vocabularies write a newline
SHIPPED = Path(__file__).with_name("toy_base")
VOCABULARY = ["<pad>", "<eos>", *TAGS, *"0123456789+-=?;Ċ"]


def make_tokenizer(kind="base"):
    """Qwen2's tokenizer with a small vocabulary and no merges: one token per character, and one per
    tag.

    Its chat template is the question alone. kind: see `toy.demonstration`.
    """
    tags = TAGS + CODE_TAGS if kind == "code" else TAGS
    vocabulary = VOCABULARY + [tag for tag in tags if tag not in VOCABULARY]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)}, merges=[],
        unk_token="<pad>", pad_token="<pad>", eos_token="<eos>",
    )
    # each tag is one token. It is not a special token, so the decoded text keeps it
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    return tokenizer


def make_config(tokenizer):
    return Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
        tie_word_embeddings=True, initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )


def make_model(tokenizer):
    """A Qwen2 of about 109,000 parameters with random weights."""
    # takes two seconds to import, and a plan needs only the shapes
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM(make_config(tokenizer))


def warm_start(model, tokenizer, *, kind="base", steps=800, batch_size=64, lr=5e-3):
    """Supervised training on the demonstrations: cross-entropy on the completion's tokens, EOS
    included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in progress.over(range(steps), "warm start", "steps"):
        demonstrations = [
            toy.demonstration(i, kind) for i in range(step * batch_size, (step + 1) * batch_size)
        ]
        prompts = tokenizer([prompt for prompt, _ in demonstrations]).input_ids
        completions = tokenizer(
            [completion + tokenizer.eos_token for _, completion in demonstrations]
        ).input_ids
        total = sum(map(len, completions))
        for batch in micro_batches([len(p) + len(c) for p, c in zip(prompts, completions)], 1024):
            lengths = torch.tensor([len(completions[i]) for i in batch])
            tokens = pad_sequence([torch.tensor(completions[i]) for i in batch], batch_first=True)
            mask = completion_mask(tokens, lengths)
            logp = completion_logprobs(model, [prompts[i] for i in batch], tokens, mask)
            loss = -logp.sum() / total  # the mean over all tokens of the step
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def make(folder, kind="base"):
    """Make a base model and its tokenizer, and save both in `folder`: about half a minute."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = make_tokenizer(kind)
    model = make_model(tokenizer)
    warm_start(model, tokenizer, kind=kind)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def base(kind="base"):
    """The folder of a base model of the toy. kind: see `toy.demonstration`.

    The kind "base" is shipped. Another kind is made on first use and kept under runs/. Its folder's
    name holds a fingerprint of the toy's two files: if one changes, a new base model is made.
    """
    if kind == "base":
        return str(SHIPPED)
    sources = [Path(toy.__file__), Path(__file__)]
    fingerprint = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]
    folder = Path("runs") / f"toy-{kind}-{fingerprint}"
    if ranks.rank() == 0 and not folder.exists():
        unfinished = Path(f"{folder}.{os.getpid()}")
        make(unfinished, kind)
        if not folder.exists():  # another run may have been faster
            unfinished.rename(folder)
    ranks.barrier()
    return str(folder)


def furthest(folder):
    """How far the weights in `folder` are from the shipped ones: the largest |difference|."""
    shipped = load_file(SHIPPED / "model.safetensors")
    made = load_file(folder / "model.safetensors")
    return max((made[name] - shipped[name]).abs().max().item() for name in shipped)


def main():
    folder = Path("runs/toy_base")
    make(folder)
    off = furthest(folder)
    print(f"{folder} holds the base model, made again.")
    if off == 0:
        print("Its weights are the shipped ones, bit for bit.")
    else:
        print(f"Its weights differ from the shipped ones by at most {off:.2g}: this machine adds "
              "up in another order.")


if __name__ == "__main__":
    main()
