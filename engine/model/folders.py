"""What is known of a model before its weights are loaded: its folder, and how long its prompts may be."""

from pathlib import Path

from engine.run.options import UserError


def checkpoints(run_dir):
    """The checkpoints of a run, the newest last."""
    return sorted(Path(run_dir).glob("checkpoint-??????"))


def resolve_model(name):
    """The hub name or folder that `load_model` loads for `name`.

    name: a hub name, a model's folder, or a run's folder, which stands for its newest checkpoint. Raises UserError if
    the folder does not exist, or lacks its weights, config or tokenizer.
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
        raise UserError(
            f"the model folder {folder} holds no tokenizer (tokenizer.json): save it there with the weights."
        )
    return str(folder)


def prompt_room(model, max_new_tokens, max_prompt_tokens):
    """The longest prompt, in tokens: max_prompt_tokens, or less, so that prompt and completion fit in the context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return max_prompt_tokens
    if context <= max_new_tokens:
        raise UserError(
            f"the model's context of {context} tokens leaves no room for a prompt: "
            f"lower --max_new_tokens {max_new_tokens}."
        )
    return min(max_prompt_tokens, context - max_new_tokens)
