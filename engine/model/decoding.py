"""Writing completions: a step for each token, for all rows at once.

A step reads the newest token of each row and draws the next one. It starts hundreds of small
kernels, and a GPU computes them in less time than the host needs to start them. So on a GPU a step
is recorded once, as a CUDA graph, and repeated: then the host starts one graph. That is why a step
changes what stands in its tensors, but not where they stand, and asks the device for nothing.
"""

import functools
import math
from functools import partial

import torch
import torch.nn.functional as F

from engine.base import progress
from engine.base.errors import one_line
from engine.model.pace import PACES
from engine.model.prompts import left_pad


@torch.inference_mode()  # less to keep than no_grad: a token of a tiny model is mostly overhead
def write_completions(model, prompts, pad_id, sampling, stop_ids, u, tokens, logp):
    """Sample completions of the prompts, and write them into `tokens` and `logp`, both (N, T).

    u: (N, T) random numbers. A completion that has ended leaves the batch as PACES says.
    """
    T = tokens.shape[1]
    pace = PACES[model.device.type]
    rows = Rows(model, sampling, stop_ids, u, tokens, logp)
    rows.draw(rows.read_prompts(prompts, pad_id, pace.records))
    step = Repeated(rows.step, pace.records and rows.plain)
    if pace.records and not rows.plain:
        note_once("note: sampling is slow, because this model keeps more than keys and values. So "
                  "a step is not recorded as a CUDA graph.")
    for t in range(1, T):
        progress.say("sampling", t + 1, T, "tokens")
        if t % pace.ask_every == 0:
            going_on = (~rows.ended.cpu()).nonzero().squeeze(1)  # here the host waits
            running = len(rows.ended)
            if len(going_on) == 0:
                break
            if len(going_on) < running and len(going_on) <= pace.leave_at * running:
                rows.keep(going_on)
                step.forget()
        if rows.widen(t, pace.columns if rows.plain else 1):
            step.forget()
        step()


class Rows:
    """The completions that are being written, one row each: n of N."""

    def __init__(self, model, sampling, stop_ids, u, tokens, logp):
        self.model, self.sampling, self.stop_ids = model, sampling, stop_ids
        # of all completions, (N, T)
        self.u, self.tokens, self.logp = u, tokens, logp
        N, _ = tokens.shape
        new = partial(torch.zeros, device=tokens.device)
        self.t = new(1, dtype=torch.long)  # the next token
        self.number = torch.arange(N, device=tokens.device)  # (n,): which completion each row is
        self.newest = new((N, 1), dtype=torch.long)  # the last token that was drawn
        self.ended = new(N, dtype=torch.bool)

    def read_prompts(self, prompts, pad_id, with_mask):
        """Logits (N, V) of the first tokens. Each prompt is computed once, then repeated.

        with_mask: whether a plain cache needs a mask even if no prompt is padded.
        """
        # it imports transformers, which takes seconds: only once there is a model
        from engine.model.kv_cache import CACHE, DynamicLayer, Place, RoomyLayer

        N, T = self.tokens.shape
        ids, mask = left_pad(prompts, pad_id, self.tokens.device)
        Q, L = ids.shape
        padded = len(set(map(len, prompts))) > 1
        position = (mask.cumsum(1) - 1).clamp(min=0)
        out = self.model(
            input_ids=ids, attention_mask=mask if padded else None, position_ids=position,
            use_cache=True, logits_to_keep=1)
        order = torch.arange(Q, device=ids.device).repeat_interleave(N // Q)
        self.cache = getattr(out, CACHE)
        self.cache.reorder_cache(order)
        kinds = {type(layer) for layer in self.cache.layers}
        self.plain = kinds == {DynamicLayer}  # each row keeps its keys and values, and nothing else
        self.place = Place(torch.full((1,), L, device=ids.device), L, L + T)
        for i, layer in enumerate(self.cache.layers):
            # a layer of another kind, for example of a sliding window or with a state in place of
            # keys, stays as transformers made it
            if type(layer) is DynamicLayer:
                self.cache.layers[i] = RoomyLayer(layer, self.place)
        self.position = position[order, -1:]  # of the newest tokens
        self.mask = None  # every row sees every column
        if padded or (with_mask and self.plain):
            mask = F.pad(mask, (0, T))[order]
            # transformers takes a mask of four dimensions as it is
            self.mask = mask[:, None, None].bool() if self.plain else mask
        return out.logits[order, -1]

    def draw(self, logits):
        """Draw the next token of each row, and write it down."""
        token, logp = sample_token(logits, self.sampling, self.u[self.number, self.t])
        self.tokens[self.number, self.t] = token
        self.logp[self.number, self.t] = logp
        self.newest.copy_(token[:, None])
        self.ended |= (self.newest == self.stop_ids).any(1)
        self.t += 1

    def step(self):
        """Read the newest token of each row, and draw the next one."""
        from engine.model.kv_cache import CACHE

        self.position += 1
        seen = None
        if self.mask is not None:
            self.mask.index_fill_(-1, self.place.column, 1)
            seen = self.mask[..., : self.place.width]
        logits = self.model(
            input_ids=self.newest, attention_mask=seen, position_ids=self.position,
            use_cache=True, **{CACHE: self.cache},
        ).logits[:, -1]
        self.place.column += 1
        self.draw(logits)

    def widen(self, t, columns):
        """Let the rows see the column of token t − 1, in a multiple of `columns`. Returns whether
        they see more than before."""
        place, before = self.place, self.place.width
        needed = self.place.room - self.tokens.shape[1] + t
        place.width = min(math.ceil(needed / columns) * columns, place.room)
        return place.width > before

    def keep(self, going_on):
        """Only these rows go on. going_on: (n,), ascending, on the CPU."""
        from engine.model.kv_cache import keep_rows

        order = keep_rows(self.cache, going_on, self.tokens.device)
        for name in ("number", "newest", "ended", "position", "mask"):
            x = getattr(self, name)
            setattr(self, name, None if x is None else x[order])


class Repeated:
    """A step that is called again and again; if `records`, from the second time on as a CUDA
    graph."""

    def __init__(self, step, records):
        self.step = step
        self.records = records
        self.warm = False  # the first time prepares what has to be prepared once
        self.graph = None

    def forget(self):
        """Its tensors are others now."""
        self.graph = None

    def __call__(self):
        if self.records and self.warm and self.graph is None:
            self.graph = record(self.step)
            self.records = self.graph is not None
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()
        self.warm = True


def record(step):
    """The step as a CUDA graph; None if it cannot be recorded."""
    stream = torch.cuda.current_stream()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # after an error it is still the one that records
        note_once("note: sampling is slow, because a step cannot be recorded as a CUDA graph "
                  f"({one_line(error)}).")


note_once = functools.cache(progress.note)  # a sentence, once in a process


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
