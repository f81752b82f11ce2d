"""What can be said of a model before its weights are loaded: where it lies, how long its prompts may be."""

from pathlib import Path

from engine.run.options import UserError


def checkpoints(run_dir):
    """The checkpoints of a run, the newest last."""
    return sorted(Path(run_dir).glob("checkpoint-??????"))


def resolve_model(name):
    """A hub name, a model's folder, or a run's folder (its newest checkpoint) as what `load_model` can load.

    Raises UserError where a folder lacks weights or a tokenizer.
    """
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UserError(f"the model folder {name} does not exist.")
        return name
    if checkpoints(folder):
        folder = checkpoints(folder)[-1]
    if not list(folder.glob("*.safetensors")) and not list(folder.glob("pytorch_model*.bin")):
        raise UserError(f"the model folder {folder} holds no weights (*.safetensors).")
    if not any((folder / f).exists() for f in ("config.json", "adapter_config.json")):
        raise UserError(f"the model folder {folder} holds no config.json.")
    if not any((folder / f).exists() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"the model folder {folder} holds no tokenizer (tokenizer.json): save it there with the weights.")
    return str(folder)


def prompt_room(model, max_new_tokens, max_prompt_tokens):
    """The longest prompt that leaves room for max_new_tokens in the model's context, and at most max_prompt_tokens."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return max_prompt_tokens
    if context <= max_new_tokens:
        raise UserError(f"the model's context of {context} tokens leaves no room for a prompt: lower --max_new_tokens {max_new_tokens}.")
    return min(max_prompt_tokens, context - max_new_tokens)
