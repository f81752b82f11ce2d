"""A sampler of your own: transformers' `generate`, behind the interface of
engine/model/sampler_interface.py.

    torchrun train.py --sampler examples/my_sampler.py:Generate --steps 4
"""

if __name__ == "__main__":
    print(__doc__)  # it is no program
    raise SystemExit

import torch
from torch.nn.utils.rnn import pad_sequence

from engine.base.errors import UserError
from engine.model.folders import resolve_model
from engine.model.logprobs import completion_mask
from engine.model.sampler_interface import Completions


class Generate:
    """It samples one question after the other, so it is slow."""

    @staticmethod
    def check(options):
        if options.lora:
            raise UserError("--sampler Generate does not take adapters: leave out --lora.")

    def __init__(self, source, tokenizer, dtype, sampling, *, stop_ids, longest, seed):
        from transformers import AutoModelForCausalLM, GenerationConfig  # takes seconds

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(resolve_model(source), dtype=dtype)
        self.model.to(device).eval()
        self.model.generation_config = GenerationConfig()  # only our options say how to sample
        self.dtype, self.stop_ids, self.pad_id = dtype, stop_ids, tokenizer.pad_token_id

    @torch.no_grad()
    def refresh(self, weights):
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)

    def free_memory(self):
        """It keeps its memory."""

    def sample(self, prompts, group_size, sampling, seed, places=None):
        if not prompts:
            return Completions.none(self.model.device)
        tokens, logp = [], []
        for place, prompt in zip(places or range(len(prompts)), prompts):
            with torch.random.fork_rng():  # the random numbers of a question follow from its place
                torch.manual_seed((seed + place) % 2**63)
                sampled, of_sampled = self.sample_group([prompt] * group_size, sampling)
            tokens.extend(sampled)
            logp.extend(of_sampled)
        tokens = pad_sequence(tokens, batch_first=True, padding_value=self.pad_id)
        stops = torch.isin(tokens, torch.tensor(self.stop_ids, device=tokens.device))
        truncated = ~stops.any(1)
        lengths = torch.where(truncated, tokens.shape[1], stops.int().argmax(1) + 1)
        mask = completion_mask(tokens, lengths)
        logp = pad_sequence(logp, batch_first=True).masked_fill(~mask, 0.0)
        return Completions(tokens, lengths, truncated, logp, mask)

    @torch.no_grad()
    def sample_group(self, prompts, sampling):
        """One completion of each prompt, all of one length. Returns (tokens, logp), both (G, T)."""
        T = sampling.temperature
        random = {"temperature": T, "top_p": sampling.top_p, "top_k": sampling.top_k}
        ids = torch.tensor(prompts, device=self.model.device)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self.stop_ids, pad_token_id=self.pad_id, do_sample=T > 0,
            return_dict_in_generate=True, output_logits=True, **(random if T else {}))
        tokens = out.sequences[:, ids.shape[1] :]
        logits = torch.stack(out.logits, dim=1).float()  # before top_p and top_k
        logp = torch.log_softmax(logits / (T or 1.0), dim=-1)
        return tokens, logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
