"""Sampling completions from the policy: the project's sampler. contract.py says what every
sampler does."""

import math

import torch
import torch.nn.functional as F
from tqdm import tqdm

from engine.base import progress
from engine.base.errors import UserError
from engine.model.contract import Completions, stop_tokens
from engine.model.logprobs import completion_mask
from engine.model.prompts import left_pad, on_device

# every so many tokens the CPU asks the device which completions have ended: while it waits, a GPU
# gets nothing to do
ASK_EVERY = {"cpu": 1, "cuda": 8}


class Sampler:
    """The project's sampler. It samples from the policy, or from a copy that `refresh` keeps up
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
            p.untyped_storage().resize_(p.nbytes)  # after `free_memory` it has none
            p.copy_(tensor)

    def free_memory(self):
        """Free the memory of the sampler's copy, if it has one, until the next `refresh`."""
        for p in self.model.parameters() if self.copy else ():
            p.untyped_storage().resize_(0)

    @torch.no_grad()
    def sample(self, prompts, group_size, sampling, seed, places=None):
        """Sample `group_size` completions of each prompt, as the contract says.

        The random number of a token depends only on the seed and on the numbers of its prompt, of
        its completion in the group, and of the token itself. So the same seed gives the same
        completions for every `batch_size` and every number of ranks, and, up to rounding, on every
        device. If memory runs out, it goes on with half as many completions at a time.

        Raises FloatingPointError if the logits are NaN.
        """
        device = self.model.device
        if not prompts:
            return Completions.none(device)
        refuse_unknown_tokens(self.model, [[self.pad_id], *prompts])
        places = list(places or range(len(prompts)))
        # those of the other ranks are drawn, too: a generator gives its numbers one after the other
        u = torch.rand(
            max(places) + 1, group_size, sampling.max_new_tokens, dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed))
        u = on_device(u[places].flatten(0, 1), device)
        tokens = torch.full(u.shape, self.pad_id, device=device)
        logp = torch.zeros(u.shape, device=device)
        stop_ids = on_device(self.stop_ids, device)
        start = 0
        while start < len(prompts):
            questions = math.ceil((self.batch_size or len(u)) / group_size)  # at a time
            chosen = prompts[start : start + questions]
            rows = slice(start * group_size, (start + questions) * group_size)
            try:
                write_completions(
                    self.model, chosen, self.pad_id, sampling, stop_ids, u[rows],
                    tokens[rows], logp[rows])
                start += questions
            except torch.OutOfMemoryError:  # the tensors of this pass are gone after the block
                if len(chosen) == 1:
                    raise
                self.batch_size = len(chosen) // 2 * group_size
                tqdm.write(f"out of memory in sampling: it goes on with {self.batch_size} "
                           "completions at a time.")
        return until_first_stop(tokens, logp, stop_ids, self.pad_id)


def refuse_unknown_tokens(model, prompts):
    """A GPU would stop with an error that does not tell the cause."""
    largest = max(map(max, prompts))
    known = model.get_input_embeddings().num_embeddings
    if largest >= known:
        raise UserError(
            f"the tokenizer writes token {largest}, and the model has embeddings for {known} only: "
            "use the model's own tokenizer, or resize the embeddings if tokens were added.")


def until_first_stop(tokens, logp, stop_ids, pad_id):
    """The Completions of sampled tokens and their log-probabilities, both (N, T). Each ends with
    its first stop token; what its row has sampled after that is dropped."""
    stops = torch.isin(tokens, stop_ids)
    truncated = ~stops.any(1)
    lengths = torch.where(truncated, tokens.shape[1], stops.int().argmax(1) + 1)
    # one wait for both
    width, broken = torch.stack([lengths.max(), logp.isnan().any()]).tolist()
    if broken:
        raise FloatingPointError("the model's logits are not finite")
    tokens = tokens[:, :width]
    mask = completion_mask(tokens, lengths)
    tokens = tokens.masked_fill(~mask, pad_id)
    logp = logp[:, :width].masked_fill(~mask, 0.0)
    return Completions(tokens, lengths, truncated, logp, mask)


@torch.inference_mode()  # less to keep than no_grad: a token of a tiny model is mostly overhead
def write_completions(model, prompts, pad_id, sampling, stop_ids, u, tokens, logp):
    """Sample completions of the prompts, and write them into `tokens` and `logp`, both (N, T).

    u: (N, T) random numbers. A completion that has ended leaves the batch: on a CPU at once, on a
    GPU at the next multiple of ASK_EVERY tokens.
    """
    # it imports transformers, which takes seconds: only once there is a model
    from engine.model.kv_cache import CACHE, keep_rows

    N, T = tokens.shape
    device = model.device
    every = ASK_EVERY[device.type]
    longest = max(map(len, prompts))
    logits, cache, mask, positions = read_prompts(model, prompts, pad_id, N // len(prompts), T)
    # rows[i]: which completion is in row i of the running batch
    rows = torch.arange(N, device=device)
    for t in range(T):
        progress.say("sampling", t + 1, T, "tokens")
        token, token_logp = sample_token(logits, sampling, u[rows, t])
        tokens[rows, t] = token
        logp[rows, t] = token_logp
        if t + 1 == T:
            break
        if (t + 1) % every == 0:
            ended = torch.isin(tokens[rows, t + 1 - every : t + 1], stop_ids).any(1)
            going_on = (~ended.cpu()).nonzero().squeeze(-1)  # here the CPU waits for the device
            if len(going_on) == 0:
                break
            if len(going_on) < len(rows):
                order = keep_rows(cache, going_on, device)
                rows = rows[order]
                token = token[order]
                if mask is not None:
                    mask = mask[order]
                    positions = positions[order]
        seen = None
        if mask is not None:
            seen = mask[:, : longest + t + 1]
            positions = positions + 1
        logits = model(
            input_ids=token[:, None], attention_mask=seen, position_ids=positions,
            use_cache=True, **{CACHE: cache},
        ).logits[:, -1]


def read_prompts(model, prompts, pad_id, group_size, new_tokens):
    """(logits (N, V) of the first tokens, cache, mask, positions (N, 1)): each prompt is computed
    once, then repeated.

    mask and positions are None if no prompt is padded. The cache and the mask have room for
    `new_tokens` tokens.
    """
    from transformers.cache_utils import DynamicLayer

    from engine.model.kv_cache import CACHE, RoomyLayer

    ids, mask = left_pad(prompts, pad_id, model.device)
    padded = len(set(map(len, prompts))) > 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if not padded:
        mask = positions = None
    out = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1
    )
    cache = getattr(out, CACHE)
    order = torch.arange(len(ids), device=ids.device).repeat_interleave(group_size)
    cache.reorder_cache(order)
    for i, layer in enumerate(cache.layers):
        # layers of another kind, for example of a sliding window or with a state in place of keys,
        # stay as transformers made them
        if type(layer) is DynamicLayer:
            cache.layers[i] = RoomyLayer(layer, ids.shape[1] + new_tokens)
            # otherwise transformers asks the device for each token whether the mask hides anything
            cache.layers[i].is_compileable = padded
    if padded:
        positions = positions[order, -1:]
        mask = F.pad(mask, (0, new_tokens), value=1)[order]
    return out.logits[order, -1], cache, mask, positions


def sample_token(logits, sampling, u=None):
    """Sample one token per row of logits (N, V): (token (N,), logp (N,)). Temperature 0 takes the
    most likely token.

    u: (N,) float64 uniform random numbers in [0, 1), which choose the tokens.
    """
    logp = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), -1)
    if sampling.temperature == 0:
        token = logits.argmax(-1)
    else:
        kept = logp
        if sampling.top_k:
            kept = most_likely(kept, sampling.top_k)
        if sampling.top_p < 1:
            kept = nucleus(kept, sampling.top_p)
        # the first token v with p_1 + … + p_v > u · total. The total is less than 1 if tokens were
        # dropped above. In float64 the sums are the same in whatever order a device adds, and
        # u · total is below the total even after rounding
        sums = kept.double().exp_().cumsum_(-1)
        token = torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True).squeeze(-1)
        # NaN is nowhere in order; `until_first_stop` refuses it
        token.clamp_(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)


def most_likely(logp, top_k):
    """logp (N, V), -∞ for all but the top_k most likely tokens."""
    smallest = logp.topk(min(top_k, logp.shape[-1])).values[:, -1:]
    return logp.masked_fill(logp < smallest, -torch.inf)


def nucleus(logp, top_p):
    """logp (N, V), -∞ for a token if the more likely tokens already hold top_p of the
    probability."""
    order = logp.argsort(-1, descending=True)
    p = logp.gather(-1, order).softmax(-1)
    dropped = p.cumsum(-1) - p >= top_p
    return logp.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
