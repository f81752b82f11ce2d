"""A reward that is a model."""

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class RewardModel:
    """A reward that asks a model: any sequence classifier of transformers with one label. The logit
    is the reward.

    If its tokenizer has a chat template, the model reads question and completion as a chat; else
    one after the other. Weights are float32, dropout is off. device: None means this process's GPU,
    if it has one. Raises ValueError if the model has more labels, or if weights are missing:
    transformers would fill them at random, differently on each rank.
    """

    def __init__(self, name, *, device=None, batch_size=16):
        self.__name__ = "reward_model"
        self.batch_size = batch_size
        self.tokenizer = AutoTokenizer.from_pretrained(
            name, padding_side="right", truncation_side="left", trust_remote_code=False)
        self.model, loading = AutoModelForSequenceClassification.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False)
        self.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model.eval()
        labels = self.model.config.num_labels
        missing = loading["missing_keys"]
        if labels != 1 or missing:
            raise ValueError(
                f"{name} is no reward model: it has {labels} labels in place of one, or lacks "
                f"weights ({', '.join(missing) or 'none'}).")
        if not self.tokenizer.pad_token:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # a causal model gives its score at the last token that is not padding: model and tokenizer
        # must agree on it
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, completions, question, **columns):
        pairs = list(zip(question, completions, strict=True))
        if self.tokenizer.chat_template:
            chats = [as_chat(*pair) for pair in pairs]
            texts = self.tokenizer.apply_chat_template(chats, tokenize=False)
        else:
            texts = [asked + answered for asked, answered in pairs]
        scores = []
        for start in range(0, len(texts), self.batch_size):
            scores += self.scores(texts[start : start + self.batch_size])
        return scores

    def scores(self, texts):
        """The scores of a batch of texts."""
        tokenizer = self.tokenizer
        inputs = tokenizer(
            texts, padding=True, truncation=tokenizer.model_max_length < 10**6,
            add_special_tokens=not tokenizer.chat_template, return_tensors="pt")
        logits = self.model(**inputs.to(self.model.device)).logits
        return logits[:, 0].tolist()


def as_chat(question, completion):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
