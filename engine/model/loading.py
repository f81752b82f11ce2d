"""Loading a causal language model of transformers, with the checks that training needs."""

from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.model.folders import resolve_model
from engine.run.options import UserError


def load_model(name, device, dtype=torch.float32):
    """(model, tokenizer) of a hub name or a folder. Weights are float32 and dropout is off, in training too:
    otherwise the policy that is scored differs from the policy that sampled, and the first ratio is not 1.
    dtype: another one for weights that are never trained."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading and saving weights; the run has a bar of its own
    name = resolve_model(name)
    try:
        adapter = Path(name, "adapter_config.json").exists()
        if not adapter and AutoConfig.from_pretrained(name).is_encoder_decoder:  # transformers would take the decoder alone
            raise UserError(f"the model {name} is an encoder-decoder: only causal language models can be trained here.")
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, loading = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the model {name} cannot be loaded: {reason}") from None
    if loading["missing_keys"]:  # transformers would make them up at random
        raise UserError(f"the weights of {name} lack {min(loading['missing_keys'])}: it is no causal language model, or not all of one.")
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {name} has no end-of-sequence token, so no completion would end: set its eos_token.")
    model.to(device).eval()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    check_head(model, name)
    if device.type == "cpu" and model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)  # several threads make a tiny model several times slower
    return model, tokenizer


@torch.no_grad()
def check_head(model, name):
    """`completion_logprobs` takes the output head by itself; refuse a model that does more to its logits than that,
    and one that `sample` cannot sample from."""
    ids = torch.arange(4, device=model.device).unsqueeze(0)
    exact = 1e-3 if model.dtype == torch.float32 else 0.1
    ours = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    out = model(input_ids=ids, use_cache=True)
    if getattr(out, "past_key_values", None) is None:
        raise UserError(f"the model {name} keeps no keys and values, from which completions are sampled here: use another model.")
    if not torch.allclose(ours, out.logits, rtol=exact, atol=exact):
        raise UserError(f"the model {name} rescales its logits after the output head, which is not supported: use another model.")
