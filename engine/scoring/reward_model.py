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
        self.__name__, self.batch_size = "reward_model", batch_size
        self.tokenizer = AutoTokenizer.from_pretrained(
            name, padding_side="right", truncation_side="left", trust_remote_code=False)
        self.model, loading = AutoModelForSequenceClassification.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False)
        self.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
        if self.model.config.num_labels != 1 or loading["missing_keys"]:
            raise ValueError(
                f"{name} is no reward model: it has {self.model.config.num_labels} labels in place "
                f"of one, or lacks weights ({', '.join(loading['missing_keys']) or 'none'})."
            )
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        # a causal model gives its score at the last token that is not padding: model and tokenizer
        # must agree on it
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, completions, question, **columns):
        pairs, template = zip(question, completions, strict=True), self.tokenizer.chat_template
        texts = [asked + answered for asked, answered in pairs]
        if template:
            texts = self.tokenizer.apply_chat_template([
                [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
                for asked, answered in zip(question, completions)
            ], tokenize=False)
        scores = []
        for start in range(0, len(texts), self.batch_size):
            inputs = self.tokenizer(
                texts[start : start + self.batch_size], add_special_tokens=not template,
                padding=True, truncation=self.tokenizer.model_max_length < 10**6,
                return_tensors="pt",
            )
            scores += self.model(**inputs.to(self.model.device)).logits[:, 0].tolist()
        return scores
