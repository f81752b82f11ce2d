"""Batched decoding with a CUDA graph: a step for each token, for all rows at once.

A step reads the newest token of each row and draws the next one. It starts hundreds of small
kernels, and a GPU computes them in less time than the host needs to start them. So on a GPU a step
is recorded once, as a CUDA graph, and repeated: then the host starts one graph. That is why a step
writes into the same tensors every time, and never asks the device for a number.
"""

import math
from bisect import bisect_left
from functools import partial

import torch
from torch.nn.functional import pad

from engine.base import progress
from engine.base.errors import one_line
from engine.model.device_defaults import DEVICE_DEFAULTS
from engine.model.prefix_sharing import read_prompts

LOOKS_EVERY = 16  # tokens: then the texts are looked at for `sampling.stop`


@torch.inference_mode()  # less to keep than no_grad: a token of a tiny model is mostly overhead
def decode_completions(model, tokenizer, prompts, sampling, stop_ids, u, tokens, logp):
    """Sample completions of the prompts, and write them into `tokens` and `logp`, both (N, T).

    u: (N, T) random numbers. A completion that has ended leaves the batch as DEVICE_DEFAULTS says.
    """
    T = tokens.shape[1]
    defaults = DEVICE_DEFAULTS[model.device.type]
    progress.say("sampling", 1, T, "tokens")
    state = DecodingState(model, prompts, sampling, stop_ids, u, tokens, logp)
    records, graph = defaults.records and state.plain, None
    for t in range(1, T):
        progress.say("sampling", t + 1, T, "tokens")
        if sampling.stop and t % LOOKS_EVERY == 0:
            said = ends_in_texts(tokens[state.number, :t], tokenizer, sampling.stop)
            state.ended |= said.any(1)
        if t % defaults.ask_every == 0:
            going_on = (~state.ended.cpu()).nonzero().squeeze(1)  # here the host waits
            running = len(state.ended)
            if len(going_on) == 0:
                break
            if len(going_on) < running and len(going_on) <= defaults.leave_at * running:
                state.keep(going_on)
                graph = None
        # the column of token t − 1 is seen now
        needed = state.prompt + t
        if needed > state.cache_position.width:
            multiple = defaults.columns if state.plain else 1
            width = math.ceil(needed / multiple) * multiple
            state.cache_position.width = min(width, state.prompt + T)
            graph = None
        if records and t > 1 and graph is None:  # the first step prepares what is prepared once
            graph = record(state.step)
            records = graph is not None
        if graph is None:
            state.step()
        else:
            graph.replay()


def ends_in_texts(tokens, tokenizer, stop):
    """(N, T) bool: True at the token with which the text of a row first holds one of the texts
    `stop`."""
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    for i, row in enumerate(tokens.tolist()):

        def holds(count, row=row):
            # as Completions.texts: some tokenizers would make "." of " ."
            text = tokenizer.decode(row[:count], clean_up_tokenization_spaces=False)
            return any(end in text for end in stop)

        if holds(len(row)):
            ends[i, bisect_left(range(1, len(row)), True, key=holds)] = True
    return ends


def record(step):
    """The step as a CUDA graph; None if it cannot be recorded."""
    stream = torch.cuda.current_stream()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # after an error it would be the one that records
        progress.note_once(
            "note: sampling is slow: a token cannot be recorded as a CUDA graph, so the host "
            f"starts each of its kernels ({one_line(error)}).")


class DecodingState:
    """Decoding state: the completions that are not finished, one row each, n of N.

    Each prompt is computed once, then repeated, and the first token of each row is drawn. The
    arguments are those of `decode_completions`.
    """

    def __init__(self, model, prompts, sampling, stop_ids, u, tokens, logp):
        # it imports transformers, which takes seconds: only once there is a model
        from engine.model.kv_cache import CACHE, CachePosition, DynamicLayer, StaticLayer

        self.sampling, self.stop_ids = sampling, stop_ids
        self.u, self.tokens, self.logp = u, tokens, logp  # of all completions, (N, T)
        device, (N, T) = tokens.device, tokens.shape
        out, mask, positions, padded = read_prompts(model, prompts, device, logits_to_keep=1)
        self.prompt = L = mask.shape[1]  # columns of the prompts
        order = torch.arange(len(mask), device=device).repeat_interleave(N // len(mask))
        self.cache = getattr(out, CACHE)
        self.cache.reorder_cache(order)
        self.model = partial(model, use_cache=True, **{CACHE: self.cache})
        # the CachePosition that the layers share
        self.cache_position = CachePosition(torch.full((1,), L, device=device), L)
        # plain: whether the cache holds keys and values of every token alone, masked as usual. A
        # model like BLOOM makes its positions from the mask, so it needs the usual one
        self.plain = model.is_backend_compatible()
        for i, layer in enumerate(self.cache.layers):
            # a layer of another kind, for example of a sliding window or with a state in place of
            # keys, stays as transformers made it
            if type(layer) is DynamicLayer:
                self.cache.layers[i] = StaticLayer(layer, L + T, self.cache_position)
            else:
                self.plain = False
        # (n, 1, 1, columns), if the cache is plain: 0 for a column that a row sees, −∞ for another,
        # which torch adds to the scores. Else (n, columns): 1 and 0. None: every row sees every
        # column. On a GPU a row of a plain cache would see columns that are not written yet
        self.mask = None
        if padded or (self.plain and DEVICE_DEFAULTS[device.type].columns > 1):
            self.mask = pad(mask, (0, T))[order]
            if self.plain:  # transformers takes a mask of four dimensions as it is
                hidden = (self.mask == 0)[:, None, None]
                shown = hidden.to(self.cache.layers[0].keys.dtype)
                self.mask = shown.masked_fill_(hidden, -torch.inf)
        self.number = torch.arange(N, device=device)  # (n,): which completion is in each row
        self.position = positions[order, -1:]  # (n, 1), of the newest token
        self.newest = torch.zeros_like(self.position)  # (n, 1): the last token that was drawn
        self.ended = torch.zeros_like(self.number, dtype=torch.bool)  # (n,)
        self.t = torch.zeros_like(self.cache_position.column)  # (1,): the token that is drawn next
        self.step(out.logits[order, -1])

    def step(self, logits=None):
        """Read the newest token of each row, and draw the next one. logits: (n, V), of the first
        tokens, for which nothing is left to read."""
        if logits is None:
            self.position += 1
            seen = None
            if self.mask is not None:
                self.mask.index_fill_(-1, self.cache_position.column, 0 if self.plain else 1)
                seen = self.mask[..., : self.cache_position.width]
            out = self.model(
                input_ids=self.newest, attention_mask=seen, position_ids=self.position)
            logits = out.logits[:, -1]
            self.cache_position.column += 1
        token, logp = sample_token(logits, self.sampling, self.u[self.number, self.t])
        self.tokens[self.number, self.t] = token
        self.logp[self.number, self.t] = logp
        self.newest.copy_(token.unsqueeze(1))
        self.ended |= (self.newest == self.stop_ids).any(1)
        self.t += 1

    def keep(self, going_on):
        """Go on with these rows only. going_on: (n,), ascending, on the CPU.

        The last ones replace those that leave, so few are copied.
        """
        order = torch.arange(len(going_on))
        free = ~torch.isin(order, going_on)
        order[free] = going_on[going_on >= len(order)]
        self.cache.reorder_cache(order)
        order = order.to(self.tokens.device, non_blocking=True)
        for name in ("number", "position", "newest", "ended"):
            setattr(self, name, getattr(self, name)[order])
        if self.mask is not None:
            self.mask = self.mask[order]


def sample_token(logits, sampling, u=None):
    """Sample one token per row of logits (N, V): (token (N,), logp (N,)). Temperature 0 takes the
    most likely token.

    u: (N,) float64 uniform random numbers in [0, 1), which choose the tokens.
    """
    # it takes seconds to import: only once there is a model
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logp = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), -1)
    if sampling.temperature == 0:
        token = logits.argmax(-1)
    else:
        kept = logp
        if sampling.top_k:
            kept = TopKLogitsWarper(sampling.top_k)(None, kept)
        if sampling.top_p < 1:
            kept = TopPLogitsWarper(sampling.top_p)(None, kept)
        # the first token v with p_1 + … + p_v > u · total. The total is less than 1 if tokens were
        # dropped above. In float64 the sums are the same in whatever order a device adds, and
        # u · total is below the total even after rounding
        sums = kept.double().exp_().cumsum_(-1)
        token = torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True).squeeze(-1)
        # NaN is nowhere in order; `until_first_stop` refuses it
        token.clamp_(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)
