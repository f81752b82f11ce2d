"""Sampling completions from the policy.

The contract of a sampler. The project's own (`Sampler`) keeps it, and so does vLLM's (vllm.py). One
of your own is a class in a file, and a line of SAMPLERS in networks.py: --rollout NAME takes it.

    Class.check(options)
        refuses options of a run that it cannot serve (UserError). options: all, as attributes.
    Class(source, tokenizer, dtype, sampling, stop_ids=…, longest=…, seed=…)
        samples from the weights of `source`, a hub name or a folder, until `refresh`. dtype: what
        it computes in. sampling: the run's. stop_ids: only these ids end a completion. longest:
        tokens of prompt and completion together.
    sample(prompts, group_size, sampling, seed, places=None) → Completions
        samples `group_size` completions of each prompt. prompts: token lists, maybe none; nothing
        is added to them. sampling: a Sampling; temperature 0 takes the most likely token. `logp` is
        that of the sampled tokens at the temperature (at 1 if it is 0), before top_p and top_k.
        `mask` says which tokens the policy wrote: only these are trained on. The same seed gives
        the same completions. places: of each prompt among those of all ranks; None:
        0, 1, 2 …; two places draw different numbers.
    refresh(weights)
        samples from these weights from now on. weights: an iterator over (name of a parameter,
        whole tensor in the sampler's `dtype`). Every rank consumes it, or no rank: with
        `--shard full` each item is gathered from all ranks.
    rest()
        gives up memory until the next `refresh`, if the sampler can.
    dtype
        of the weights that `refresh` is given.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm

from engine.base import progress
from engine.base.errors import refuse
from engine.model.logprobs import completion_mask
from engine.model.prompts import left_pad

# every so many tokens the CPU asks the device which completions have ended: while it waits, a GPU
# gets nothing to do
ASK_EVERY = {"cpu": 1, "cuda": 8}


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. The scorer uses the same temperature: it scores the policy that
    was sampled."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class Completions:
    """N sampled completions, question by question. Padding stands on the right."""

    tokens: torch.Tensor  # (N, T) int64, as sampled: never decoded and tokenized again
    lengths: torch.Tensor  # (N,) int64, EOS included
    truncated: torch.Tensor  # (N,) bool: cut off at max_new_tokens, without an EOS
    # (N, T) float32, log-probability of each token at the sampling temperature; 0 on padding
    logp: torch.Tensor
    # (N, T) bool: the tokens that the policy wrote, EOS included. Only these are trained on.
    # A sampler with tools leaves out what a tool wrote
    mask: torch.Tensor

    @classmethod
    def none(cls, device):
        """Of no prompt: in a run's last step a rank may have no question."""
        empty = torch.zeros((0, 1), device=device)
        one = empty[:, 0]
        return cls(empty.long(), one.long(), one.bool(), empty, empty.bool())

    def texts(self, tokenizer, questions=()):
        """The completions as text, for the rewards, without EOS and other special tokens.

        questions: the Q questions that were asked, as `load_questions` returns them. If they are
        given, each text begins with the thought that its prompt has opened.
        """
        thoughts = [question.get("begun", "") for question in questions] or [""]
        group_size = len(self.tokens) // len(thoughts)
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        texts = [
            tokenizer.decode(row[:n], **plain)
            for row, n in zip(self.tokens.tolist(), self.lengths.tolist())
        ]
        return [thoughts[i // group_size] + text for i, text in enumerate(texts)]


def stop_tokens(model, tokenizer):
    """The ids that end a completion: the tokenizer's EOS, and all EOS of the model's generation
    config."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({*ids, tokenizer.eos_token_id} - {None})


def sample_token(logits, sampling, u=None):
    """Sample one token per row of logits (N, V): (token (N,), logp (N,)). Temperature 0 takes the
    most likely token.

    u: (N,) float64 uniform random numbers in [0, 1), which choose the tokens.
    """
    logp = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), -1)
    if sampling.temperature == 0:
        token = logits.argmax(-1)
        return token, logp.gather(-1, token[:, None]).squeeze(-1)
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
    # the first token v with p_1 + … + p_v > u · total. The total is less than 1 if tokens were
    # dropped above. In float64 the sums are the same in whatever order a device adds, and u · total
    # is below the total even after rounding
    sums = kept.double().exp_().cumsum_(-1)
    token = torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True).squeeze(-1)
    # NaN is nowhere in order; `sample` refuses it at its end
    token.clamp_(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)


class Sampler:
    """The project's own sampler: `sample` from the policy, or from a copy that `refresh` keeps up
    to date."""

    def __init__(self, model, tokenizer, copy=False):
        self.model, self.copy, self.dtype = model, copy, model.dtype
        self.batch_size = None  # completions at a time, rounded up to whole questions; None: all
        self.stop_ids, self.pad_id = stop_tokens(model, tokenizer), tokenizer.pad_token_id

    @staticmethod
    def check(options):
        """It serves every run."""

    @torch.no_grad()
    def refresh(self, weights):
        """Write the policy's weights, (name, whole tensor) in `dtype`, into the sampler's copy, if
        it has one."""
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights if self.copy else ():
            p = parameters[name]
            p.untyped_storage().resize_(p.nbytes)  # after `rest` it has none
            p.copy_(tensor)

    def rest(self):
        """Free the memory of the sampler's copy, if it has one, until the next `refresh`."""
        for p in self.model.parameters() if self.copy else ():
            p.untyped_storage().resize_(0)

    def sample(self, prompts, group_size, sampling, seed, places=None):
        """`sample` with random numbers of this seed. If memory runs out, it begins again with half
        as many at a time.

        The completions stay the same, because a random number belongs to its completion.
        """
        while True:
            try:
                return sample(
                    self.model, prompts, group_size, sampling, stop_ids=self.stop_ids,
                    pad_id=self.pad_id, batch_size=self.batch_size,
                    generator=torch.Generator().manual_seed(seed), places=places,
                )
            except torch.OutOfMemoryError:
                questions = min(
                    len(prompts),
                    math.ceil((self.batch_size or len(prompts) * group_size) / group_size),
                )
                if questions == 1:
                    raise
            # here the error is gone, and with it the tensors of the pass that failed
            self.batch_size = questions // 2 * group_size
            tqdm.write(
                f"out of memory in sampling: it goes on with {self.batch_size} completions at a "
                "time."
            )


@torch.no_grad()
def sample(
    model, prompts, group_size, sampling,
    *, stop_ids, pad_id, batch_size=None, generator=None, places=None,
):
    """Sample `group_size` completions of each prompt.

    prompts: token lists. batch_size: as for `Sampler`. generator: a CPU's. places: of each prompt
    among those of all ranks; None: 0, 1, 2 … Returns Completions with N = len(prompts) · group_size
    rows, a question's rows side by side.

    Raises FloatingPointError if the logits are NaN.

    The random number of a token depends only on the generator, the prompt's place, the completion's
    place in its group and the token's place. So the same seed gives the same completions for every
    batch_size and every number of ranks, and, up to rounding, on every device.
    """
    device, n = model.device, len(prompts) * group_size
    if not prompts:
        return Completions.none(device)
    largest, known = max(pad_id, *map(max, prompts)), model.get_input_embeddings().num_embeddings
    refuse([(  # a GPU would stop with an error that does not tell the cause
        largest >= known,
        f"the tokenizer writes token {largest}, and the model has embeddings for {known} only: use "
        "the model's own tokenizer, or resize the embeddings if tokens were added.",
    )])
    places = list(places or range(len(prompts)))
    # those of the other ranks are drawn, too: a generator gives its numbers one after the other
    u = torch.rand(
        max(places) + 1, group_size, sampling.max_new_tokens, dtype=torch.float64,
        generator=generator,
    )
    u = u[places].flatten(0, 1).to(device, non_blocking=True)
    tokens = torch.full((n, sampling.max_new_tokens), pad_id, device=device)
    logps = torch.zeros((n, sampling.max_new_tokens), device=device)
    stop_ids = torch.tensor(stop_ids).to(device, non_blocking=True)
    at_a_time = math.ceil((batch_size or n) / group_size)  # questions
    for i in range(0, len(prompts), at_a_time):
        rows = slice(i * group_size, (i + at_a_time) * group_size)
        ids, mask = left_pad(prompts[i : i + at_a_time], pad_id, device)
        _sample(model, ids, mask, sampling, stop_ids, u[rows], tokens[rows], logps[rows])
    # a completion ends with its first stop token; what its row has sampled after that is dropped
    stops = torch.isin(tokens, stop_ids)
    truncated = ~stops.any(1)
    lengths = torch.where(truncated, sampling.max_new_tokens, stops.int().argmax(1) + 1)
    # one wait for both
    longest, broken = torch.stack([lengths.max(), logps.isnan().any()]).tolist()
    if broken:
        raise FloatingPointError("the model's logits are not finite")
    tokens, logps = tokens[:, :longest], logps[:, :longest]
    mask = completion_mask(tokens, lengths)
    tokens = tokens.masked_fill(~mask, pad_id)
    logps = logps.masked_fill(~mask, 0.0)
    return Completions(tokens, lengths, truncated, logps, mask)


def _read_prompts(model, ids, mask, group_size, new_tokens):
    """(logits (N, V) of the first tokens, cache, mask, positions (N, 1)): each prompt is computed
    once, then repeated.

    mask and positions are None if no prompt is padded. The cache and the mask have room for
    `new_tokens` tokens.
    """
    # it imports transformers, which takes seconds: only once there is a model
    from engine.model.kv_cache import give_room

    padded = bool((mask == 0).any())
    mask, positions = (mask, (mask.cumsum(1) - 1).clamp(min=0)) if padded else (None, None)
    out = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1
    )
    logits, cache = out.logits[:, -1].repeat_interleave(group_size, 0), out.past_key_values
    order = torch.arange(len(ids), device=ids.device).repeat_interleave(group_size)
    give_room(cache, order, ids.shape[1] + new_tokens)
    if padded:
        positions = positions[:, -1:].repeat_interleave(group_size, 0)
        mask = F.pad(mask, (0, new_tokens), value=1).repeat_interleave(group_size, 0)
        # otherwise transformers asks the device for each token whether the mask hides anything
        for layer in cache.layers:
            layer.is_compileable = True
    return logits, cache, mask, positions


def _sample(model, ids, mask, sampling, stop_ids, u, tokens, logps):
    """Sample completions of the prompts (ids, mask), and write them into `tokens` and `logps`, both
    (N, T).

    A completion that has ended leaves the batch: on a CPU at once, on a GPU at the next multiple of
    ASK_EVERY tokens.
    """
    from engine.model.kv_cache import keep_rows

    device, every, new_tokens = model.device, ASK_EVERY[model.device.type], sampling.max_new_tokens
    logits, cache, mask, positions = _read_prompts(
        model, ids, mask, len(tokens) // len(ids), new_tokens
    )
    # rows[i]: which completion is in row i of the running batch
    rows = torch.arange(len(tokens), device=device)
    for t in range(new_tokens):
        progress.say("sampling", t + 1, new_tokens, "tokens")
        token, logp = sample_token(logits, sampling, u[rows, t])
        tokens[rows, t], logps[rows, t] = token, logp
        if t + 1 == new_tokens:
            break
        if (t + 1) % every == 0:
            ended = torch.isin(tokens[rows, t + 1 - every : t + 1], stop_ids).any(1)
            going_on = (~ended.cpu()).nonzero().squeeze(-1)  # here the CPU waits for the device
            if len(going_on) == 0:
                break
            if len(going_on) < len(rows):
                order = keep_rows(cache, going_on, device)
                rows, token = rows[order], token[order]
                mask, positions = (None, None) if mask is None else (mask[order], positions[order])
        if mask is not None:
            positions = positions + 1
        logits = model(
            input_ids=token[:, None],
            attention_mask=None if mask is None else mask[:, : ids.shape[1] + t + 1],
            position_ids=positions, past_key_values=cache, use_cache=True,
        ).logits[:, -1]
