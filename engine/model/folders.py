"""Model folders: where a model is, and how long its prompts may be, before weights are loaded."""

import functools
import json
import math
import os
import re
from pathlib import Path
from textwrap import shorten

from engine.base.errors import UserError, one_line


def checkpoints(run_dir):
    """The checkpoints of a run, the newest last. Their names end in the number of the step, of six
    digits or more."""
    folders = [path for path in Path(run_dir).glob("checkpoint-*")
               if re.fullmatch("checkpoint-[0-9]{6,}", path.name)]
    return sorted(folders, key=lambda path: int(path.name.split("-")[1]))


def resolve_model(name):
    """The hub name or folder that `load_model` loads for `name`.

    name: a hub name, a model's folder, or a run's folder, which stands for its newest checkpoint.
    Raises UserError if `name` looks like a folder that does not exist, or is one without a model.
    """
    path, saved = Path(name), checkpoints(name)
    of_hub = re.fullmatch(r"(?!runs/)\w[\w.-]*(/[\w.-]+)?", str(name))  # OWNER/NAME
    if path.exists():
        if not [*saved, *path.glob("*config.json")]:
            raise UserError(f"{name} holds no model: name a folder with a config.json, or the "
                            "folder of a run.")
    elif not of_hub or ("/" in of_hub[0] and path.parent.is_dir()):
        raise UserError(f"the model folder {name} does not exist.")
    else:
        ask_hub(name)
    return str([path, *saved][-1])


def why_unread(name, error):
    """Why a model cannot be read, in words. error: of transformers, which asks the hub for a name
    that is no folder."""
    if isinstance(error, OSError) and not Path(name).is_dir():
        of_hub = shorten(str(error), 120, placeholder=" …")
        return f"there is no such folder here; the hub's library says: {of_hub}"
    # after these words follows a list
    return one_line(error).partition(" for this kind of AutoModel")[0]


def adapters_in(folder):
    """adapter_config.json of a folder; None: it holds no adapters of peft."""
    path = Path(folder, "adapter_config.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def base_of(folder):
    """The model to which the adapters in a folder belong; a folder without adapters itself."""
    adapters = adapters_in(folder)
    return adapters["base_model_name_or_path"] if adapters else folder


@functools.cache
def ask_hub(name, kind="model"):
    """Ask the hub once, for a few seconds, for a model or a "dataset".

    If the hub cannot be reached, its library would try every file for half a minute. So the library
    goes offline, as with HF_HUB_OFFLINE=1: it uses its cache, or says what is missing.
    """
    import huggingface_hub as hub  # takes half a second to import, and a folder does not need it

    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "README.md", repo_type=kind), timeout=5)
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError):
        pass  # the hub answers; what is wrong with the name, loading says
    # of a library for networks; the hub's library changes it now and then
    except Exception:
        hub.constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"


def context_of(config):
    """The longest prompt + completion that a model's config allows, in tokens; ∞: it names no
    limit.

    LongRoPE (Phi-3.5, Phi-4-mini) turns all rows of a batch by other angles if one row is longer
    than the original length. Then log-probabilities would depend on the other rows, and those of
    the sampler would differ from those of the update. So the original length is the limit. Dynamic
    NTK, too, changes its angles there: its max_position_embeddings is the original length.
    """
    shape = config.get_text_config()
    rope = getattr(shape, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(shape, "max_position_embeddings", None) or math.inf


def prompt_room(model, max_new_tokens, max_prompt_tokens):
    """The longest prompt, in tokens: max_prompt_tokens, or less, so that prompt and completion fit
    in `context_of`."""
    context = context_of(model.config)
    if context <= max_new_tokens:
        raise UserError(
            f"with --max_new_tokens {max_new_tokens} the model's context of {context} tokens "
            f"leaves no room for a prompt: try --max_new_tokens {context // 2}.")
    return min(max_prompt_tokens, context - max_new_tokens)
