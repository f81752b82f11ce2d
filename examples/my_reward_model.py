"""A reward of your own that asks a model: any sequence classifier of transformers with one label.
Its logit is the reward.

    export REWARD_MODEL=...               a folder, or a name on the hub
    torchrun train.py --rewards toy_accuracy examples/my_reward_model.py:judged:0.1

The first call loads the model. A call may take 60 seconds (TIMEOUT in engine/scoring/score.py).
"""

import functools
import os

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

BATCH_SIZE = 16


@functools.cache
def classifier():
    """(model, tokenizer), in float32 and without dropout."""
    name = os.environ["REWARD_MODEL"]
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right", truncation_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        name, dtype=torch.float32, output_loading_info=True)
    labels, missing = model.config.num_labels, loading["missing_keys"]
    if labels != 1 or missing:  # missing weights would be random numbers
        raise ValueError(f"{name} has {labels} labels, or lacks weights: {missing}")
    # a causal model gives its score at the last token that is not padding
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


@torch.no_grad()
def judged(completions, question, **columns):
    """The logit of each completion. question: N texts.

    If the tokenizer has a chat template, the model reads question and completion as a chat; else
    one after the other.
    """
    model, tokenizer = classifier()
    chat = tokenizer.chat_template is not None
    texts = []
    for asked, answered in zip(question, completions, strict=True):
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        text = tokenizer.apply_chat_template(turns, tokenize=False) if chat else asked + answered
        texts.append(text)
    scores = []
    for start in range(0, len(texts), BATCH_SIZE):
        inputs = tokenizer(
            texts[start : start + BATCH_SIZE], padding=True, add_special_tokens=not chat,
            truncation=tokenizer.model_max_length < 10**6, return_tensors="pt")
        scores += model(**inputs.to(model.device)).logits[:, 0].tolist()
    return scores
