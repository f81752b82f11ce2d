"""The builtin sampler. sampler_interface.py says what every sampler does, and decoding.py draws the
tokens."""

import math

import torch
from tqdm import tqdm

from engine.base.errors import UserError
from engine.model.decoding import decode_completions, ends_in_texts
from engine.model.prefix_sharing import on_device
from engine.model.sampler_interface import Completions, stop_tokens


class Sampler:
    """The project's sampler. It samples from the policy, or from a copy that `refresh` keeps up
    to date."""

    def __init__(self, model, tokenizer, copy=False):
        self.model, self.copy, self.dtype = model, copy, model.dtype
        self.batch_size = None  # completions at a time, rounded up to whole questions; None: all
        self.stop_ids, self.pad_id = stop_tokens(model, tokenizer), tokenizer.pad_token_id
        self.tokenizer = tokenizer

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
        largest = max(self.pad_id, *map(max, prompts))
        known = self.model.get_input_embeddings().num_embeddings
        if largest >= known:  # a GPU would stop with an error that does not tell the cause
            raise UserError(
                f"the tokenizer writes token {largest}, and the model has embeddings for {known} "
                "only: use the model's own tokenizer, or resize the embeddings if tokens were "
                "added.")
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
                decode_completions(
                    self.model, self.tokenizer, chosen, sampling, stop_ids, u[rows],
                    tokens[rows], logp[rows])
                start += questions
            except torch.OutOfMemoryError:  # the tensors of this pass are gone after the block
                if len(chosen) == 1:
                    raise
                self.batch_size = len(chosen) // 2 * group_size
                tqdm.write(f"out of memory in sampling: it goes on with {self.batch_size} "
                           "completions at a time.")
        stops = torch.isin(tokens, stop_ids)
        if sampling.stop:
            stops |= ends_in_texts(tokens, self.tokenizer, sampling.stop)
        drawn = until_first_stop(tokens, logp, stops, self.pad_id)
        drawn.stop = sampling.stop
        return drawn


def until_first_stop(tokens, logp, stops, pad_id):
    """The Completions of sampled tokens and their log-probabilities, both (N, T). Each ends with
    the first token at which `stops`, (N, T), is True; what its row has sampled after that is
    dropped."""
    truncated = ~stops.any(1)
    lengths = torch.where(truncated, tokens.shape[1], stops.int().argmax(1) + 1)
    # one wait for both
    width, broken = torch.stack([lengths.max(), logp.isnan().any()]).tolist()
    if broken:
        raise FloatingPointError("the model's logits are not finite")
    tokens = tokens[:, :width]
    # made from the lengths: an EOS counts even if padding has the same id
    mask = torch.arange(width, device=tokens.device) < lengths.unsqueeze(1)
    tokens = tokens.masked_fill(~mask, pad_id)
    logp = logp[:, :width].masked_fill(~mask, 0.0)
    return Completions(tokens, lengths, truncated, logp, mask)
