"""The sampler interface, and the records that go through it.

The builtin sampler (sampler.py) has this interface. One of your own is a class in a file:
--sampler FILE.py:CLASS takes it. Two are written already: examples/my_sampler.py with transformers'
`generate`, and examples/vllm_sampler.py with vLLM.

    Class.check(options)
        refuses options of a run that it cannot serve (UserError). options: all, as attributes.
    Class(source, tokenizer, dtype, sampling, stop_ids=…, longest=…, seed=…)
        samples from the weights of `source`, a hub name or a folder, until `refresh`. dtype: what
        it computes in. sampling: the run's. stop_ids: only these ids end a completion. longest:
        tokens of prompt and completion together.
    Class(builtin, tokenizer, sampling), if `Class.wraps_builtin` is True
        samples with `builtin`, the project's sampler of the policy, for example to call a tool
        (examples/my_tool.py).
    sample(prompts, group_size, sampling, seed, places=None) → Completions
        samples `group_size` completions of each prompt. prompts: token lists, maybe none; nothing
        is added to them. sampling: a Sampling; temperature 0 takes the most likely token. `logp` is
        that of the sampled tokens at the temperature (at 1 if it is 0), before top_p and top_k.
        `mask` says which tokens the policy wrote: only these are trained on. What a tool wrote
        takes room, too: a completion has at most sampling.max_new_tokens tokens. The last token of
        one that is not `truncated` is the policy's. Every token,
        padding too, has an embedding in the policy. The same seed gives the same completions.
        places: the number of each prompt among those of all ranks; None: 0, 1, 2 …; two prompts
        with different numbers draw differently. A completion ends with the first token after which
        its text holds one of `sampling.stop`. A sampler that cannot do this refuses options.stop.
    refresh(weights)
        samples from these weights from now on. weights: an iterator over (name of a parameter,
        whole tensor in the sampler's `dtype`). Every rank consumes it, or no rank: with
        `--shard full` each item is gathered from all ranks.
    free_memory()
        gives up memory until the next `refresh`, if the sampler can.
    dtype
        of the weights that `refresh` is given.
"""

from dataclasses import dataclass
from functools import partial

import torch

from engine.base.errors import UserError, call_custom


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. The scorer uses the same temperature: it scores the policy that
    was sampled."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: list[str] | None = None  # texts that end a completion, besides the stop tokens


@dataclass
class Completions:
    """N sampled completions, question by question. Padding is on the right."""

    tokens: torch.Tensor  # (N, T) int64, as sampled: never decoded and tokenized again
    lengths: torch.Tensor  # (N,) int64, EOS included
    # (N,) bool: cut off at max_new_tokens, without an EOS and without a text of `stop`
    truncated: torch.Tensor
    # (N, T) float32, log-probability of each token at the sampling temperature; 0 on padding
    logp: torch.Tensor
    # (N, T) bool: the tokens that the policy wrote, EOS included. Only these are trained on.
    # A sampler with tools leaves out what a tool wrote
    mask: torch.Tensor
    stop: list[str] | None = None  # of the Sampling

    @classmethod
    def none(cls, device):
        """Of no prompt: in a run's last step a rank may have no question."""
        empty = torch.zeros((0, 1), device=device)
        one = empty[:, 0]
        return cls(empty.long(), one.long(), one.bool(), empty, empty.bool())

    def texts(self, tokenizer, questions=()):
        """The completions as text, for the rewards, without padding and without the token or the
        text that ends them. Other special tokens stay: a model's <think> may be one.

        questions: the Q questions that were asked, as `load_questions` returns them. If they are
        given, each text begins with the thought that its prompt has opened.
        """
        thoughts = [question.get("begun", "") for question in questions] or [""]
        group_size = len(self.tokens) // len(thoughts)
        silent = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        rows = self.tokens.tolist()
        # if a completion was not cut off, its last token ends it, or completes a text of `stop`
        ends = (self.lengths - (~self.truncated).long()).tolist()
        decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        texts = []
        for i, (row, end) in enumerate(zip(rows, ends)):
            written = [token for token in row[:end] if token not in silent]
            text = decode(written)
            if self.stop:
                whole = decode(written + row[end : end + 1])
                before = min((whole.partition(word)[0] for word in self.stop), key=len)
                text = text if before == whole else before
            texts.append(thoughts[i // group_size] + text)
        return texts


def check_sampler(sampler, name, vocabulary):
    """Let what a sampler of the user's own returns be checked, at each call. vocabulary: how many
    tokens the model has.

    To look at the values, the host waits for the GPU once. It would do so next anyway, to read the
    completions.
    """

    def fits(drawn, prompts, group_size, sampling, *others):
        shape = len(prompts) * group_size, drawn.tokens.shape[1]  # (N, T)
        right = Completions.none("cpu")
        for field in ("tokens", "logp", "mask", "lengths", "truncated"):
            tensor, like = getattr(drawn, field), getattr(right, field)
            kind, wanted = (tensor.dtype, tensor.shape), (like.dtype, shape[: like.dim()])
            if kind != wanted:
                raise UserError(f"{name} returned {field} of {kind[0]} and shape {tuple(kind[1])}, "
                                f"not of {wanted[0]} and shape {wanted[1]}.")
        if problem := first_problem(drawn, vocabulary):
            raise UserError(f"{name} returned {problem}: engine/model/sampler_interface.py says "
                            "what a sampler returns.")
        return shape[1] <= max(1, sampling.max_new_tokens)

    sampler.sample = partial(
        call_custom, sampler.sample, name,
        "Completions: tokens (int64), logp (float32) and mask (bool), each (N, T) for N = prompts "
        "× group_size and T ≤ max_new_tokens, and lengths (int64) and truncated (bool), each (N,)",
        fits)


def first_problem(drawn, vocabulary):
    """What is wrong with the values of Completions, in words; None: nothing."""
    tokens, mask = drawn.tokens, drawn.mask
    lengths = drawn.lengths.to(tokens.device).unsqueeze(1)
    truncated = drawn.truncated.to(tokens.device).unsqueeze(1)
    T = tokens.shape[1]
    place = torch.arange(T, device=tokens.device)
    missing = ~mask & (place == lengths - 1) & ~truncated
    wrong = {
        # a GPU would stop with an error that does not tell the cause
        f"tokens (or padding) outside of 0 … {vocabulary - 1}":
            (tokens < 0) | (tokens >= vocabulary),
        "lengths outside of 1 … T": (lengths < 1) | (lengths > T),
        "a mask that does not end with its completion": mask & (place >= lengths) | missing,
        "logp above 0": mask & (drawn.logp > 0.01),  # less may be rounding
    }
    found = torch.stack([places.any() for places in wrong.values()]).tolist()  # here it waits
    for words, there in zip(wrong, found):
        if there:
            return words


def stop_tokens(model, tokenizer):
    """The ids that end a completion: the tokenizer's EOS, all EOS of the model's generation config,
    and the token with which the chat template ends the assistant's turn."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({*ids, tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None})


def end_of_turn(tokenizer):
    """The token with which the chat template ends the assistant's turn; None: there is none.

    Base models often have a template but no such EOS. Without it they would write on into the next
    turn.
    """
    answer = "An answer."
    for content in (answer, [{"type": "text", "text": answer}]):  # some take only a list of parts
        turns = [{"role": role, "content": content} for role in ("user", "assistant")]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # there is no template, or it takes no such chat
            continue
        _, found, after = text.rpartition(answer)
        if found:
            ids = tokenizer(after, add_special_tokens=False).input_ids
            return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None
    return None
