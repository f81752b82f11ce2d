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


def as_read(tokenizer, question, completion):
    """What the model reads of one answer.

    With a chat template it is a chat. Encoders (BERT, DeBERTa) have a separator: they read a pair,
    [CLS] question [SEP] completion [SEP]. Other models read one text.
    """
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": question}]
        turns.append({"role": "assistant", "content": completion})
        return tokenizer.apply_chat_template(turns, tokenize=False)
    if tokenizer.sep_token is not None:
        return question, completion
    return question + completion


def scores_of(model, tokenizer, answers):
    """The logit of each answer, (N,). answers: N of `as_read`."""
    inputs = tokenizer(
        answers, padding=True, add_special_tokens=tokenizer.chat_template is None,
        truncation=tokenizer.model_max_length < 10**6, return_tensors="pt")
    return model(**inputs.to(model.device)).logits[:, 0]


@torch.no_grad()
def judged(completions, question, **columns):
    """The logit of each completion. question: N texts."""
    model, tokenizer = classifier()
    pairs = zip(question, completions, strict=True)
    answers = [as_read(tokenizer, asked, answered) for asked, answered in pairs]
    scores = []
    for start in range(0, len(answers), BATCH_SIZE):
        scores += scores_of(model, tokenizer, answers[start : start + BATCH_SIZE]).tolist()
    return scores
