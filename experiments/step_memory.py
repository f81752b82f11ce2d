"""Memory of a whole training step of each algorithm: what a reference costs, and what a critic
costs.

    python experiments/step_memory.py                          prints a table; `reproduce.py` shows
                                                               its columns, too

A Qwen2 with 26 million random parameters makes one step on 16 kept completions (8 with GFPO, 4 with
PODS). Each algorithm has its own process. Two figures are counted: the bytes of all networks'
parameters, and the bytes of AdamW's moments. The third is measured: the growth of the process at
its peak, with networks, gradients and activations. Needs Linux. If there is a GPU, its memory is
measured. """

import multiprocessing
import random
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from algorithms import ALGORITHMS
from engine.model.logprobs import Policy
from engine.model.networks import whole_networks
from engine.model.precision import choose_dtype
from engine.model.sampling import Sampling
from engine.run.config import Config, check
from engine.run.options import run_program
from engine.scoring.score import Reward
from engine.tasks import toy_model
from engine.tasks.questions import load_questions
from experiments.memory import growth, return_what_is_freed
from train import train_step
from update import Limits


def digits(completions, **columns):
    """A reward that differs between completions: the number of digits."""
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def one_step(options, hidden_size, device):
    """Make the networks and one step with them. Returns the bytes of [parameters, the optimizer's
    moments]."""
    config = Config(**options | {"questions_per_step": 1, "max_new_tokens": 32})
    algorithm, tokenizer = check(config), toy_model.make_tokenizer()
    questions, _ = load_questions("toy", tokenizer, limit=algorithm.questions_per_step)
    torch.manual_seed(0)
    model = (
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer), hidden_size=hidden_size,
                intermediate_size=2 * hidden_size, num_hidden_layers=10, num_attention_heads=8,
                num_key_value_heads=8, tie_word_embeddings=True,
                eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
            )
        )
        .to(device)
        .eval()
    )
    policy = Policy(model, choose_dtype("auto", device, 0))  # on every CPU float32
    networks = whole_networks(
        policy, tokenizer, lr=config.lr, beta=config.beta, critic=algorithm.critic
    )
    rewards = [Reward("digits", digits)]
    train_step(
        networks, algorithm, rewards, Sampling(32), Limits(), lambda missing: questions,
        random.Random(1),
    )
    everything = [
        p
        for network in (*networks.learners, networks.reference and networks.reference.model)
        if network
        for p in network.parameters()
    ]
    moments = [t for state in networks.optimizer.state.values() for t in state.values()]
    return [sum(t.numel() * t.element_size() for t in tensors) for tensors in (everything, moments)]


def measure(job):
    options, hidden_size = job
    return_what_is_freed()
    torch.set_num_threads(1)
    device, held = torch.device("cuda" if torch.cuda.is_available() else "cpu"), []
    one_step(options, 32, device)  # what the very first step allocates for good
    peak = growth(lambda: held.extend(one_step(options, hidden_size, device)), device)
    return {"parameters": held[0], "optimizer": held[1], "peak": peak}


def memory(methods, hidden_size=512):
    """{name: {parameters, optimizer, peak}} in bytes, of one step. methods: {name: options of
    train.py}."""
    jobs = [(options, hidden_size) for options in methods.values()]
    # a fork cannot use a GPU that its parent has used; without a GPU it saves the seconds of
    # starting afresh
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    with context.Pool(1, maxtasksperchild=1) as pool:
        return dict(
            zip(
                methods,
                tqdm(
                    pool.imap(measure, jobs, chunksize=1), total=len(jobs), desc="memory of a step"
                ),
            )
        )


def main(argv):
    print("| | parameters, MB | optimizer | peak of a step |\n|---|---|---|---|")
    for name, row in memory({name: {"algorithm": name} for name in ALGORITHMS}).items():
        print(
            f"| {name} | "
            + " | ".join(f"{row[part] / 1e6:.0f}" for part in ("parameters", "optimizer", "peak"))
            + " |"
        )


if __name__ == "__main__":
    run_program(main)
