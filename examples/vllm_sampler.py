"""Sampling with vLLM, if it is installed, behind the contract of engine/model/sampler_interface.py.

    torchrun train.py … --sampler examples/vllm_sampler.py:VLLM

vLLM runs inside the training process: one engine per rank, on the rank's own device. It has its own
copy of the weights, which `refresh` overwrites. It computes with other kernels than the trainer, so
its log-probabilities differ a little from the trainer's: `--sampler_correction` corrects for that.

vLLM takes 0.3 of a GPU's memory and keeps it during the update. To change this, write a file of
your own, for example runs/mine.py, and add `--sampler runs/mine.py:Small`:

    from examples.vllm_sampler import VLLM

    class Small(VLLM):
        share = 0.15

`--plan` does not know the share. Plan for the rest of the GPU: with 0.15 of 80 GB, `--plan 68`.
"""

if __name__ == "__main__":
    print(__doc__)  # it is no program
    raise SystemExit

import gc
import os
import random
from importlib.util import find_spec

import torch
from torch.nn.utils.rnn import pad_sequence

from engine.base import ranks
from engine.base.errors import UserError, one_line
from engine.model.folders import context_of, resolve_model
from engine.model.logprobs import completion_mask
from engine.model.sampler_interface import Completions, Sampling

# bytes for keys and values on a CPU; if they are too few, some completions wait for others to end
CPU_CACHE = 2**30
TESTED = "0.32"  # the version that this file was written for
INSTALL = f"pip install vllm (tested: version {TESTED})"


class VLLM:
    """A vLLM engine in this process. It samples from the weights of the last `refresh`, at first
    from those of `source`. The arguments are those of the contract.

    Creating an engine seeds the global random numbers with the run's seed. On a CPU
    torch.set_num_threads has no effect afterwards. Raises UserError if vLLM cannot run the model.
    """

    share = 0.3  # of a GPU's memory, for vLLM's weights, activations and cache

    @staticmethod
    def check(options):
        cure = "or use --sampler builtin."
        if options.lora:
            raise UserError(f"vLLM does not take adapters here: leave out --lora, {cure}")
        if find_spec("vllm") is None and options.plan is None:
            raise UserError(f"--sampler {options.sampler} needs vLLM: {INSTALL}.")
        if not 0.01 <= options.temperature <= 2:
            raise UserError("vLLM takes a --temperature in [0.01, 2], not "
                            f"{options.temperature}: change it, {cure}")

    def __init__(self, source, tokenizer, dtype, sampling, *, stop_ids, longest, seed):
        # one process, so that weights are not copied
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from transformers import AutoConfig
        from vllm import LLM  # takes seconds, and reads the environment

        source, gpu = resolve_model(source), torch.cuda.is_available()
        context = context_of(AutoConfig.from_pretrained(source))
        self.pad_id, self.stop_ids, self.dtype = tokenizer.pad_token_id, list(stop_ids), dtype
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
        try:
            self.engine = LLM(
                source,
                # prompts and completions are ids, and only our options say how to sample
                skip_tokenizer_init=not sampling.stop,  # which are looked for in the text
                generation_config="vllm",
                dtype=self.dtype,
                max_model_len=min(longest, context),
                gpu_memory_utilization=self.share,
                kv_cache_memory_bytes=None if gpu else CPU_CACHE,
                enable_prefix_caching=True,  # the G completions of a question share its prompt
                logprobs_mode="processed_logprobs",  # log π at the temperature
                # under torchrun each rank has its own engine, on the device of its LOCAL_RANK
                distributed_executor_backend="external_launcher" if ranks.world_size() > 1
                else "uni",
                # a CPU has no graphs to capture, and compiling takes longer than it saves
                enforce_eager=not gpu,
                seed=seed, use_tqdm_on_load=False,
            )
            # vLLM would end all process groups, the trainer's too, when its engine is deleted:
            # ranks.stop does it
            self.engine.llm_engine.engine_core._finalizer.detach()
            gc.unfreeze()  # vLLM has hidden objects from the garbage collector
            self.sample([[self.pad_id]], 1, Sampling(1), 0)  # a missing kernel shows up only now
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise UserError(f"vLLM cannot run the model {source} here: {one_line(error)}") from None

    def refresh(self, weights):
        """Sample from these weights from now on. weights: all (Hugging Face name, whole tensor) of
        the model."""
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.engine.apply_model(pack_heads)
        # the cache holds keys and values of the old weights
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache.")

    def free_memory(self):
        """vLLM keeps its share of the memory."""

    def sample(self, prompts, group_size, sampling, seed, places=None):
        """Sample `group_size` completions of each prompt, as the contract says.

        prompts: token lists. sampling: the run's, or one of temperature 0. Each completion has its
        own random seed. It follows from `seed`, the prompt's number among those of all ranks,
        and the completion's number in its group. `logp` is vLLM's: at the temperature (at 1 if the
        temperature is 0).
        """
        from vllm import SamplingParams

        if not prompts:
            return Completions.none(self.device)
        places, rng = list(places or range(len(prompts))), random.Random(seed)
        # of all prompts of all ranks, in order
        seeds = [[rng.getrandbits(62) for _ in range(group_size)] for _ in range(max(places) + 1)]
        requests, options = [], []
        for prompt, place in zip(prompts, places):
            for own_seed in seeds[place]:
                requests.append({"prompt_token_ids": prompt})
                options.append(SamplingParams(
                    temperature=sampling.temperature, max_tokens=sampling.max_new_tokens,
                    seed=own_seed, stop_token_ids=self.stop_ids, ignore_eos=True, logprobs=0,
                    detokenize=bool(sampling.stop), stop=sampling.stop,
                    include_stop_str_in_output=True,
                ))
        tokens, logp, truncated = [], [], []
        for request in self.engine.generate(requests, options, use_tqdm=False):
            output = request.outputs[0]
            steps = zip(output.token_ids, output.logprobs)
            tokens.append(torch.tensor(output.token_ids))
            logp.append(torch.tensor([at[token].logprob for token, at in steps]))
            truncated.append(output.finish_reason == "length")
        lengths = torch.tensor([*map(len, tokens)])
        tokens = pad_sequence(tokens, batch_first=True, padding_value=self.pad_id)
        logp = pad_sequence(logp, batch_first=True)
        mask = completion_mask(tokens, lengths)
        found = (tokens, lengths, torch.tensor(truncated), logp, mask)
        return Completions(*(x.to(self.device) for x in found), sampling.stop)


def pack_heads(model):
    """Pack the output head again. On a CPU vLLM computes with a packed copy of the head, and
    `reload_weights` does not renew that copy if the head is tied to the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
