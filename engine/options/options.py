"""The options of a run, in records. Each record is a group of `--help`."""

from dataclasses import dataclass, fields

from algorithms import ALGORITHMS, SCALE_REWARDS, TOKEN_WEIGHTS, Row
from engine.model.sampler_interface import Sampling
from engine.options.command_line import option
from family.tis import CORRECTIONS
from tasks.table import TASKS, task_of


@dataclass
class DataOptions:
    _argument_group_name = "what to train, and on what"

    model: str = option(
        "toy", "name on the hub, folder of a model, folder of a run (its newest checkpoint), or "
        "toy (its base model)")
    dataset: str = option(
        "toy", f"{', '.join(TASKS)}, or a .jsonl file of questions")
    columns: list[str] | None = option(
        None, "question=NAME answer=NAME, or one of the two: what these columns are called in the "
        "files (or data sets of the hub) that --dataset and --eval_dataset name; a.b: the field b "
        "of the column a")
    rewards: list[str] | None = option(
        None, "NAME or FILE.py:FUNCTION, each with an optional :WEIGHT; the first is the accuracy; "
        "else the data set's")
    system_prompt: str | None = option(
        None, "system prompt of the chat; else the data set's, which asks for <think> and "
        "<answer> tags")
    chat_template_kwargs: dict | None = option(
        None, "for the model's chat template, as JSON, for example "
        "'{\"enable_thinking\": false}'")
    max_prompt_tokens: int = option(
        512, "longest prompt in tokens; questions with a longer prompt are skipped",
        limits="[1, ∞)")
    eval_dataset: str | None = option(
        None, "data set that is scored before and after training, named as in --dataset; else "
        "the test split of --dataset, if it is known to have one of its own")
    eval_questions: int | None = option(
        None, "how many questions of it are scored, at most; 0: none; else 256 of the test split "
        "(the toy: 512), 512 of an --eval_dataset", limits="[0, ∞)")
    eval_every: int | None = option(
        None, "steps between evaluations (greedy) on 256 questions that are held out of the "
        "training set, or on those of an --eval_dataset that you name; best/ in the run's folder "
        "is the checkpoint with the highest accuracy or mean reward", limits="[1, ∞)")
    # no option: what is shown. "reward": the first one is the user's own, and is no verdict
    measure: str = "accuracy"

    @property
    def tested(self):
        """The data set that is scored before and after training, or None."""
        of_its_own = self.dataset if task_of(self.dataset).has_test_split else None
        return (self.eval_dataset or of_its_own) if self.eval_questions else None


@dataclass
class RowOptions:
    """The fields of a row (None: what the row says), and what a run can add to any row."""

    _argument_group_name = "the algorithm (else what its row in algorithms.py says)"

    algorithm: str = option("cppo", f"a row of the table: {', '.join(ALGORITHMS)}")
    questions_per_step: int | None = option(
        None, "B, questions per device and step before allocation; else the data set's",
        limits="[1, ∞)")
    beta: float | None = option(
        None, "β, weight of the KL to the reference; 0: no reference", limits="[0, ∞)")
    clip_low: float | None = option(
        None, "ε_low: the ratio is clipped below 1 − ε_low; 1e9: no clip", limits="(0, ∞)")
    clip_high: float | None = option(
        None, "ε_high: the ratio is clipped above 1 + ε_high; 1e9: no clip", limits="(0, ∞)")
    group_size: int | None = option(None, "G, completions sampled per question", limits="[1, ∞)")
    keep: str | None = option(
        None, "which completions are kept: a rule of KEEP in loop/keep.py, or FILE.py:FUNCTION")
    token_weights: str | None = option(
        None, "how much each token counts: 1/(N·|o|), the same in the whole batch, or 1/(N·L) with "
        "the longest completion L", choices=tuple(TOKEN_WEIGHTS))
    scale_rewards: str | None = option(
        None, "by what r − mean is divided: the std of the group, that of the batch, or nothing",
        choices=tuple(SCALE_REWARDS))
    pruning_rate: float | None = option(
        None, "P, the share that is pruned: ⌊G(1−P)⌋ completions are kept per question",
        limits="[0, 1)")
    allocation: bool | None = option(
        None, "take more questions in place of the pruned completions: ⌊B·G/k⌋ instead of B")
    mu: int | None = option(None, "μ, passes over each batch of completions", limits="[1, ∞)")
    minibatches: int | None = option(
        None, "mini-batches that a batch is cut into; each pass makes one update per mini-batch",
        limits="[1, ∞)")

    # added to the row; None: off
    target_kl: float | None = option(
        None, "end the updates on a batch when KL(π_old ‖ π_θ) exceeds this", limits="(0, ∞)")
    sampler_correction: str | None = option(
        None, "correct for a sampler that computes otherwise: by the ratio π_old / π_sampler of "
        "each token or of the completion, truncated or masked", choices=tuple(CORRECTIONS))
    min_prefix: float | None = option(
        None, "NAT: train on a random prefix of each completion, which has at least this share of "
        "it", limits="[0, 1]")
    overlong_buffer: int | None = option(
        None, "DAPO: a penalty grows from 0 to −1 over this many last tokens of max_new_tokens",
        limits="[1, ∞)")
    mask_truncated: bool = option(
        False, "do not train on completions cut off at max_new_tokens; their rewards still count "
        "in the group")


# what `resolve` takes, and of these the fields of a row
ALGORITHM_OPTIONS = {f.name for f in fields(RowOptions)} - {"algorithm"}
ROW_FIELDS = ALGORITHM_OPTIONS & {f.name for f in fields(Row)}


@dataclass(frozen=True)
class SamplingOptions(Sampling):
    _argument_group_name = "sampling"

    temperature: float = option(
        1.0, "sampling temperature; log-probabilities follow it", limits="(0, ∞)")
    max_new_tokens: int | None = option(
        None, "longest completion in tokens; else the data set's (1024 for most)",
        limits="[1, ∞)")
    stop: list[str] | None = option(
        None, "texts that end a completion, besides the end-of-sequence tokens, for a base model "
        "that writes on; rewards do not see them")
    sampler: str = option(
        "builtin", "builtin is engine/model/sampler.py; or FILE.py:CLASS, one of your own "
        "(examples/vllm_sampler.py:VLLM is vLLM)")


@dataclass
class UpdateOptions:
    _argument_group_name = "the update"

    lr: float | None = option(
        None, "peak learning rate of AdamW, from which it falls to 0 like a cosine; else the data "
        "set's (1e-6 for most)", limits="[0, ∞)")
    warmup: float = option(
        0.1, "share of the run in which the learning rate rises", limits="[0, 1)")


@dataclass
class DeviceOptions:
    _argument_group_name = "memory and devices"

    dtype: str = option(
        "auto", "what is computed in: float32 or bfloat16; auto: bfloat16 on a GPU, and on a CPU "
        "with AMX for models of 10 million parameters and more; the optimizer always changes "
        "float32 weights", choices=("auto", "float32", "bfloat16"))
    micro_batch_tokens: int | None = option(
        None, "tokens in a micro-batch: prompts, completions and padding; else 2048 on a CPU, and "
        "on a GPU up to 16384, if the memory plan says that they fit", limits="[1, ∞)")
    gradient_checkpointing: bool = option(
        False, "keep only the layers' inputs for the backward pass: less memory, a third more time")
    shard: str = option(
        "none", "none: every device holds all; full: the devices divide weights, gradients, "
        "optimizer (FSDP2)", choices=("none", "full"))
    lora: int | None = option(
        None, "train only low-rank adapters of this rank (peft); use about ten times the --lr",
        limits="[1, ∞)")


@dataclass
class RunOptions:
    _argument_group_name = "the run"

    recipe: str | None = option(None, "a YAML file of options; the command line wins over the file")
    hooks: str | None = option(
        None, "FILE.py with a function metrics of your own, which is logged of each step "
        "(examples/my_metrics.py)")
    output_dir: str | None = option(None, "folder of the run; else a new folder under runs/")
    resume: bool = option(
        False, "continue the run in --output_dir, from its newest checkpoint and with its options")
    seed: int = option(
        42, "seed of the sampling and of the order of the questions", limits="(-∞, ∞)")
    epochs: float | None = option(
        None, "passes over the questions; else as many as --steps need, or the data set's (1 for "
        "most)", limits="(0, ∞)")
    steps: int | None = option(
        None, "how many steps the run makes; with --epochs, too: the smaller one counts",
        limits="[1, ∞)")
    stop_kl: float | None = option(
        None, "end the run when KL(π_θ ‖ π_ref), the mean of 4 steps, exceeds this; its model is "
        "the newest checkpoint from before; with --beta 0 this costs the memory and the forward "
        "pass of a reference", limits="(0, ∞)")
    save_every: int = option(50, "steps between checkpoints", limits="[1, ∞)")


@dataclass
class PreviewOptions:
    _argument_group_name = "instead of training"

    check_rewards: bool = option(
        False, "sample the questions of the first step, and print a prompt and the values of each "
        "reward")
    plan: float | None = option(
        None, "print the memory that the run needs per device, and whether it fits a device of so "
        "many GB (without a number: this machine's GPU, or 80); also the peak with each of "
        "up to five changes; exit code 3: the run does not fit", limits="[0, ∞)", alone=0.0)


# --- of eval.py ---


@dataclass
class EvaluationOptions:
    """Options of eval.py."""

    model: str = option("toy", "hub name, model folder, folder of a run, or toy: its base model")
    best: bool = option(False, "of a run with --eval_every: its best checkpoint")
    benchmark: list[str] | None = option(
        None, f"{', '.join(TASKS)}, .jsonl files; none: toy")
    columns: list[str] | None = option(
        None, "question=NAME answer=NAME, or one of the two: what these columns are called in the "
        "files (or data sets of the hub) of --benchmark; a.b: the field b of the column a")
    questions: int = option(
        0, "how many of each, from the first one on; 0: all of them", limits="[0, ∞)")
    samples: int = option(
        4, "k of avg@k, pass@k, maj@k: completions sampled per question; 0: only the greedy one",
        limits="[0, ∞)")
    temperature: float = option(
        1.0, "of the sampled completions; the greedy one is always scored", limits="(0, ∞)")
    top_p: float = option(1.0, "nucleus of the sampled completions", limits="(0, 1]")
    top_k: int = option(
        0, "sample from so many of the most likely tokens; 0: from all", limits="[0, ∞)")
    max_new_tokens: int | None = option(
        None, "longest completion; none: the benchmark's", limits="[1, ∞)")
    max_prompt_tokens: int = option(
        512, "questions with a longer prompt are skipped and counted", limits="[1, ∞)")
    batch_size: int = option(
        256, "completions sampled at a time; the draws depend on it", limits="[1, ∞)")
    system_prompt: str | None = option(None, "of the chat; none: the benchmark's")
    chat_template_kwargs: dict | None = option(None, "for the chat template, as JSON")
    stop: list[str] | None = option(None, "texts that end a completion, too")
    sampler: str = option(
        "builtin", "builtin, or FILE.py:CLASS, one that is built on it (with a tool)")
    judge: str | None = option(
        None, "the reward by which a completion is right, as the first of train.py's --rewards; "
        "none: the benchmark's")
    seed: int = option(42, "of the sampling", limits="(-∞, ∞)")
    output_dir: str | None = option(
        None, "where the results go; none: the model's folder, runs/eval-NAME for one of the hub")
    measure: str = "accuracy"  # no option: that of the run
    run: dict | None = None  # no option: all options of the run
