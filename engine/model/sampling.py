"""Sampling completions from the policy, and the contract between the sampler and the scorer."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from engine.model.logprobs import completion_mask
from engine.model.precision import autocast, compute_dtype
from engine.run.options import UserError

# every so many tokens the CPU asks the device which completions have ended: while it waits, a GPU gets nothing to do
ASK_EVERY = {"cpu": 1, "cuda": 8}


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. The scorer uses the same temperature: it scores the policy that was sampled."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def notes(self):
        """A list with a warning, if the sampled policy is not the model's own."""
        if self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0:
            return []
        return [
            "temperature, top_p or top_k is set: completions are sampled from a policy that is not the model's own. "
            "Log-probabilities follow the temperature, but not top_p and top_k."
        ]


@dataclass
class Completions:
    """N sampled completions, question by question. Padding stands on the right; masks are made from the lengths."""

    tokens: torch.Tensor  # (N, T) int64, as sampled: never decoded and tokenized again
    lengths: torch.Tensor  # (N,) int64, EOS included
    truncated: torch.Tensor  # (N,) bool: cut off at max_new_tokens, without an EOS
    logp: torch.Tensor  # (N, T) float32, log-probability of each token at the sampling temperature; 0 on padding

    def texts(self, tokenizer, questions=()):
        """The completions as text, for the rewards, without EOS and other special tokens.

        questions: the Q questions that were asked, as `load_questions` returns them. If they are given, each text
        begins with the thought that its prompt has opened.
        """
        rows = [tokens[:n] for tokens, n in zip(self.tokens.tolist(), self.lengths.tolist())]
        thoughts = [question.get("begun", "") for question in questions for _ in range(len(rows) // len(questions))]
        texts = [tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in rows]
        return [thought + text for thought, text in zip(thoughts or [""] * len(rows), texts, strict=True)]


def stop_tokens(model, tokenizer):
    """The ids that end a completion: the tokenizer's EOS, and all EOS of the model's generation config."""
    configured = model.generation_config.eos_token_id
    ids = [] if configured is None else [configured] if isinstance(configured, int) else list(configured)
    return sorted({*ids, tokenizer.eos_token_id} - {None})


def left_pad(prompts, pad_id, device):
    """(ids, mask), both (Q, L), of Q token lists: padded on the left, so that all prompts end in the same column."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)


def sample_token(logits, sampling, generator=None):
    """Sample one token per row of logits (N, V): (token (N,), logp (N,)). Temperature 0 takes the most likely token."""
    if sampling.temperature == 0:
        token = logits.argmax(-1)
        return token, torch.log_softmax(logits.float(), -1).gather(-1, token[:, None]).squeeze(-1)
    logp = torch.log_softmax(logits.float() / sampling.temperature, -1)
    kept = logp
    if sampling.top_k:
        smallest = kept.topk(min(sampling.top_k, kept.shape[-1])).values[:, -1:]
        kept = kept.masked_fill(kept < smallest, -torch.inf)
    if sampling.top_p < 1:
        order = kept.argsort(-1, descending=True)
        p = kept.gather(-1, order).softmax(-1)
        # a token is dropped if the more likely tokens already hold top_p of the probability
        dropped = p.cumsum(-1) - p >= sampling.top_p
        kept = kept.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    # if the E_v are exponential random numbers, argmax_v p_v / E_v is a sample from p.
    # torch.multinomial samples the same tokens, but makes the CPU wait twice for a GPU, to check p
    p = kept.softmax(-1)
    token = p.div_(torch.empty_like(p).exponential_(generator=generator)).argmax(-1)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)


class Sampler:
    """The project's own sampler: `sample` from the policy, or from a copy that `refresh` keeps up to date.

    batch_size: completions that are sampled at a time, rounded up to whole questions; None: all.
    """

    def __init__(self, model, tokenizer, copy=False, batch_size=None):
        self.model, self.copy, self.dtype = model, copy, compute_dtype(model)
        self.batch_size = batch_size
        self.stop_ids, self.pad_id = stop_tokens(model, tokenizer), tokenizer.pad_token_id

    @torch.no_grad()
    def refresh(self, weights):
        """Write the policy's weights, (name, whole tensor) in `dtype`, into the sampler's copy, if it has one."""
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights if self.copy else ():
            parameters[name].copy_(tensor)

    def sample(self, prompts, group_size, sampling, seed):
        """`sample` with a generator of this seed."""
        generator = torch.Generator(self.model.device).manual_seed(seed)
        return sample(
            self.model, prompts, group_size, sampling,
            stop_ids=self.stop_ids, pad_id=self.pad_id, generator=generator,
        )


@torch.no_grad()
def sample(model, prompts, group_size, sampling, *, stop_ids, pad_id, generator=None):
    """Sample `group_size` completions of each prompt.

    prompts: token lists. Returns Completions with N = len(prompts) · group_size rows, a question's rows side by side.
    The model reads each prompt once; its keys and values are copied for the whole group. A completion that has ended
    leaves the batch: on a CPU at once, on a GPU at the next multiple of ASK_EVERY tokens. So a CPU and a GPU sample
    different completions with the same seed.
    """
    device = model.device
    if not prompts:  # in a run's last step a rank may have no question
        empty = torch.zeros((0, 1), device=device)
        return Completions(empty.long(), empty[:, 0].long(), empty[:, 0].bool(), empty)
    largest, known = max(pad_id, *map(max, prompts)), model.get_input_embeddings().num_embeddings
    if largest >= known:  # a GPU would stop with an error that does not tell the cause
        raise UserError(
            f"the tokenizer writes token {largest}, and the model has embeddings for {known} only: "
            "use the model's own tokenizer, or resize the embeddings if tokens were added."
        )
    with autocast(model, device) if model.dtype == torch.float32 else nullcontext():
        return _sample(model, *left_pad(prompts, pad_id, device), group_size, sampling, stop_ids, pad_id, generator)


def _read_prompts(model, ids, mask, group_size):
    """(logits (N, V) of the first tokens, the cache, the mask, padded): each prompt is computed once, then repeated."""
    padded = bool((mask == 0).any())
    position = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(
        input_ids=ids, attention_mask=mask if padded else None, position_ids=position if padded else None,
        use_cache=True, logits_to_keep=1,
    )
    cache = out.past_key_values
    cache.batch_repeat_interleave(group_size)
    if ASK_EVERY[model.device.type] > 1 and padded:
        for layer in cache.layers:  # otherwise transformers asks the GPU at every token whether the mask hides anything
            layer.is_compileable = True
    return out.logits[:, -1].repeat_interleave(group_size, 0), cache, mask.repeat_interleave(group_size, 0), padded


def _sample(model, ids, mask, group_size, sampling, stop_ids, pad_id, generator):
    device, every, n = model.device, ASK_EVERY[model.device.type], len(ids) * group_size
    logits, cache, mask, padded = _read_prompts(model, ids, mask, group_size)
    tokens = torch.full((n, sampling.max_new_tokens), pad_id, device=device)
    logps = torch.zeros((n, sampling.max_new_tokens), device=device)
    stop_ids = torch.tensor(stop_ids).to(device, non_blocking=True)
    rows = torch.arange(n, device=device)  # rows[i]: which completion is in row i of the running batch
    for t in range(sampling.max_new_tokens):
        token, logp = sample_token(logits, sampling, generator)
        tokens[rows, t], logps[rows, t] = token, logp
        if t + 1 == sampling.max_new_tokens:
            break
        if (t + 1) % every == 0:
            ended = torch.isin(tokens[rows, t + 1 - every : t + 1], stop_ids).any(1)
            keep = (~ended).nonzero().squeeze(-1)  # here the CPU waits for the device
            if len(keep) == 0:
                break
            if len(keep) < len(rows):
                rows, token, mask = rows[keep], token[keep], mask[keep]
                cache.batch_select_indices(keep)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        out = model(
            input_ids=token[:, None], attention_mask=mask if padded else None,
            position_ids=mask.sum(1, keepdim=True) - 1 if padded else None, past_key_values=cache, use_cache=True,
        )
        logits = out.logits[:, -1]
    # a completion ends with its first stop token; what its row has sampled after that is dropped
    stops = torch.isin(tokens[:, : t + 1], stop_ids)
    truncated = ~stops.any(1)
    lengths = torch.where(truncated, t + 1, stops.int().argmax(1) + 1)
    longest = int(lengths.max())
    padding = ~completion_mask(tokens[:, :longest], lengths)
    tokens, logps = tokens[:, :longest].masked_fill(padding, pad_id), logps[:, :longest].masked_fill(padding, 0.0)
    return Completions(tokens, lengths, truncated, logps)
