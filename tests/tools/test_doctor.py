"""Why does my reward not rise? Each fault is made in a real run, and the doctor names it first."""

import contextlib
import shutil

import pytest
import torch

import train
from engine.base import files
from engine.base.errors import UserError
from engine.model import networks
from engine.model.loading import load_model
from engine.model.sampling import Sampler
from engine.run import curves
from engine.run.metrics import group_gap
from experiments.library import toy_model
from tasks import toy
from tasks.table import TASKS
from tests.training import CPU, a_rollout, completion_logprobs
from tools import doctor
from tools.doctor import main, nothing_found

REWARDS = '''
from tests.training import completion_logprobs
from rewards import extract_answer

def even(completions, **columns):
    """What a small model can learn: half of the answers are even."""
    return [float((extract_answer(text) or "1")[-1] in "02468") for text in completions]

def odd(completions, **columns):
    return [1 - value for value in even(completions)]

def zero(completions, **columns):
    return [0.0] * len(completions)

def one(completions, **columns):
    return [1.0] * len(completions)

def longer(completions, **columns):
    return [len(text) / 100 for text in completions]

def shorter(completions, **columns):
    return [1 - len(text) / 500 for text in completions]

def safe(completions, answer, **columns):
    """The answer 5 costs nothing. Any other one, if it is wrong, costs much."""
    given = [extract_answer(text) for text in completions]
    return [1.0 if x == gold else 0.0 if x == "5" else -3.0 for x, gold in zip(given, answer)]

def fails_on_thoughts(completions, **columns):
    if any("<think>" in text for text in completions):
        raise ValueError("a thought")
    return even(completions)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the rewards and with questions of the toy."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "own.py").write_text(REWARDS)
    questions(folder, lambda row: row["answer"])
    return folder


def questions(folder, answer):
    """Write questions of the toy with these answers. answer: a function of the row."""
    rows = [toy.question(i) for i in range(400)]
    files.write(folder / "questions.jsonl", files.as_lines(
        {"question": row["question"], "answer": answer(row)} for row in rows))


@pytest.fixture
def found(folder, tmp_path, small, monkeypatch):
    """found(words of the command line) → what the doctor finds in this run."""
    monkeypatch.setattr(curves, "curves", lambda *_: None)

    def found(words, model=small, data=folder):
        words = [
            "--model", str(model), "--dataset", f"{data}/questions.jsonl", "--output_dir",
            str(tmp_path / "run"), "--algorithm", "grpo", "--questions_per_step", "2",
            "--group_size", "8", "--steps", "10", "--lr", "3e-4", "--minibatches", "2",
            "--max_new_tokens", "40", "--rewards", "toy_accuracy",
            *words.replace("own:", f"{folder}/own.py:").split()]
        with contextlib.suppress(UserError):  # if the run stops, because it failed too often
            train.main(words)
        return doctor.diagnosis(tmp_path / "run")[0]

    return found


def named_first(findings, what):
    assert findings and findings[0].startswith(what), findings


def slowly(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize("words, what", [
    ("--rewards own:one", "The reward pays wrong answers"),
    ("--rewards own:fails_on_thoughts", "A reward function fails"),
    ("--max_new_tokens 2", "Answers are cut off"),
    ("--max_new_tokens 12 --steps 16", "Answers are cut off"),
    slowly("--max_new_tokens 30 --steps 16", "Answers are cut off"),
    ("--temperature 3", "The samples are noise"),
    ("--temperature 0.05 --rewards own:even", "The samples are all alike"),
    ("--lr 0.1 --rewards own:even", "The updates are too large"),
    ("--lr 1e-8 --mu 1 --minibatches 1 --rewards own:even", "The updates hardly move"),
    ("--steps 24 --rewards own:even own:odd:3", "Another reward is gamed"),
    slowly("--rewards code_accuracy code_format", "In most completions no answer is found"),
    slowly("--lr 1e-5 --rewards own:even", "The updates hardly move"),
    slowly("--lr 0.1 --mu 1 --minibatches 1 --beta 0 --steps 24 --rewards own:even",
           "The updates are too large"),
    slowly("--lr 5e-5 --clip_low 1e-6 --clip_high 1e-6 --rewards own:even",
           "The clip takes the gradient away"),
    slowly("--steps 16 --max_new_tokens 24 --rewards own:longer", "The length runs away"),
    slowly("--steps 40 --lr 2e-4 --rewards own:shorter", "The length collapses"),
])
def test_a_fault_is_named_first(words, what, found):
    named_first(found(words), what)


@pytest.mark.parametrize("words, what", [
    ("--steps 1 --max_new_tokens 2", "Answers are cut off"),
    ("--steps 3 --rewards own:zero", "The reward never fires"),
    ("--steps 3 --rewards own:one", "The reward pays wrong answers"),
])  # fmt: skip
def test_what_is_certain_needs_no_eight_steps(words, what, found):
    named_first(found(words), what)


@pytest.mark.parametrize("share, said", [(0.6, True), (0.4, False)])
def test_a_few_steps_in_which_most_completions_are_cut_off(share, said, tmp_path):
    logged(tmp_path, truncated=share)
    log = tmp_path / "metrics.jsonl"
    files.write(log, files.as_lines(files.read(log)[:3]))
    findings = doctor.diagnosis(tmp_path)[0]
    assert bool(findings) == said
    assert not said or findings[0].startswith("Answers are cut off. Seen in 3 steps: ")


def test_a_rule_that_keeps_nothing(found, folder):
    (folder / "rule.py").write_text("def none(rollout, advantages, k):\n    return []\n")
    words = f"--steps 3 --algorithm cppo --keep {folder}/rule.py:none"
    named_first(found(words), "No completion is kept")


def test_three_steps_of_a_healthy_run_show_nothing(found):
    assert found("--steps 3 --algorithm cppo") == []


# --- faults of the model ---


def test_a_model_without_eos(found, small, tmp_path):
    copy = shutil.copytree(small, tmp_path / "model")
    for path in copy.glob("*config.json"):
        text = path.read_text().replace('"eos_token_id": 1', '"eos_token_id": 0')
        path.write_text(text.replace('"eos_token": "<eos>"', '"eos_token": "<pad>"'))
    named_first(found("", model=copy), "Answers do not end: the model has no EOS")


def barely_trained(folder, steps):
    """The folder of a model after a short warm start."""
    torch.manual_seed(0)
    tokenizer = toy_model.make_tokenizer()
    model = toy_model.make_model(tokenizer)
    toy_model.warm_start(model, tokenizer, steps=steps, batch_size=32)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


def test_a_model_that_knows_no_form(found, tmp_path):
    model = barely_trained(tmp_path / "model", steps=1)
    named_first(found("", model=model), "In most completions no answer is found")


@pytest.fixture(scope="module")
def drilled(small, tmp_path_factory):
    """A model that has learned to answer 2 to everything."""
    model, tokenizer = load_model(small, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.tensor([tokenizer.encode(f"<answer>2</answer>{tokenizer.eos_token}")] * 8)
    for i in range(25):
        prompts = [tokenizer.encode(toy.question(8 * i + j)["question"]) for j in range(8)]
        logp = completion_logprobs(model, prompts, tokens, torch.ones(tokens.shape).bool())
        (-logp.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("drilled")
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("answer, what", [
    (lambda row: "2", "The questions are too easy"),
    (lambda row: "3", "The questions are too hard"),
    (lambda row: "2" if "1" in row["question"] else "3", "A question is always right or always"),
])
def test_questions_of_which_nothing_can_be_learned(answer, what, found, drilled, tmp_path):
    questions(tmp_path, answer)
    named_first(found("", model=drilled, data=tmp_path), what)


@pytest.mark.slow
def test_a_policy_that_falls_for_a_safe_answer(found, tmp_path, monkeypatch):
    monkeypatch.setattr(toy_model, "THINKING_SHARE", 0.0)
    guesser = barely_trained(tmp_path / "model", steps=80)
    findings = found("--steps 40 --beta 0 --rewards own:safe", model=guesser)
    named_first(findings, "The entropy collapses")
    assert "as '<answer>5</answer>'" in findings[0]


def test_a_sampler_with_other_weights(found, monkeypatch):
    sample = Sampler.sample

    def perturbed(self, *args, **options):
        own = {name: p.clone() for name, p in self.model.state_dict().items()}
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.model.parameters():
                p += 0.1 * p.std() * torch.randn(p.shape, generator=generator)
        try:
            return sample(self, *args, **options)
        finally:
            self.model.load_state_dict(own)

    monkeypatch.setattr(Sampler, "sample", perturbed)
    named_first(found("--steps 3 --rewards own:even"), "Sampler and trainer disagree")


def test_a_sampler_that_mixes_the_questions(found, monkeypatch):
    """It returns the first completion of every question, then the second ones: (G, Q), not (Q,
    G)."""
    sample = Sampler.sample

    def mixed(self, prompts, group_size, *args):
        completions = sample(self, prompts, group_size, *args)
        order = torch.arange(len(prompts) * group_size).view(len(prompts), group_size).T.flatten()
        return type(completions)(*(x[order] for x in vars(completions).values()))

    monkeypatch.setattr(Sampler, "sample", mixed)
    named_first(found("--steps 8"), "A group is not one question")


def test_the_gap_within_a_group():
    """Three completions of one question. They share 2 tokens, 3 tokens and none with the first one,
    which is as far from itself as 0."""
    tokens = torch.tensor([[5, 6, 7, 0], [5, 6, 8, 9], [5, 6, 7, 0], [4, 6, 7, 8]])
    logp = torch.tensor([[-1.0, -2.0, -3.0, 0], [-1.5, -2.5, -9, -9], [-1.0, -2.0, -3.6, 0],
                         [-5.0, -9, -9, -9]])
    mask = tokens > 0
    rollout = a_rollout(torch.zeros(1, 4), mask.sum(1).view(1, 4), tokens=tokens, logp=logp,
                        mask=mask)
    assert group_gap(rollout).item() == pytest.approx(0.5 + 0.2, abs=1e-6)


@pytest.mark.parametrize("template", [True, False])
def test_a_chat_template_that_is_not_applied(template, found, tmp_path, monkeypatch):
    """A model that has learned to answer the question alone, and knows letters, loses its
    template."""
    letters = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz:", "Ġ"]
    monkeypatch.setattr(toy_model, "VOCABULARY", toy_model.VOCABULARY + letters)
    model = barely_trained(tmp_path / "model", steps=60)
    if not template:
        (model / "chat_template.jinja").unlink()
    findings = found("--system_prompt=. --max_new_tokens 24", model=model)
    said = findings and findings[0].startswith("The chat template is not applied")
    assert bool(said) is not template, findings
    if said:
        assert "\\nUser: " in findings[0] and "\\nAssistant:" in findings[0]


# --- healthy runs ---


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [
    "grpo", "cppo", "drgrpo", "dapo", "gspo", "gdpo", "pods", "cppo_published", "ppo",
    "gfpo --pruning_rate 0.25",  # at its 0.5 GFPO needs more steps than a test has
])
def test_a_run_that_learns_gets_no_finding(algorithm, found, tmp_path, monkeypatch):
    # PPO's critic learns at the toy's rate: the questions come from a file, whose rate is GSM8K's
    monkeypatch.setattr(networks, "task_of", lambda name: TASKS["toy"])
    assert not found(
        f"--algorithm {algorithm} --questions_per_step 4 --steps 32", model=toy.BASE)
    metrics = doctor.metrics_of(files.read(tmp_path / "run/metrics.jsonl"))
    assert metrics["accuracy"].rises


# --- what is said ---


def rows_of(first="a", **metrics):
    """The rows of a run in which nothing else is wrong. first: the name of its reward. metrics:
    {name: its value in all steps, or a list of its values}."""
    usual = {"accuracy": 0.5, "reward": 0.5, f"reward/{first}": 0.5, "no_signal": 0.1,
             f"no_signal/{first}": 0.1, "length": 9.0, "truncated": 0.0, "entropy": 0.3, "kl": 0.1,
             "kl_old": 0.001, "clip_fraction": 0.01, "grad_norm": 1.0, "lr": 1e-3}
    lists = {name: value if isinstance(value, list) else [value] * 10
             for name, value in (usual | metrics).items()}
    return [{"step": i + 1} | {name: values[i] for name, values in lists.items()}
            for i in range(10)]


def logged(folder, completion="<answer>2</answer>", first="a", **metrics):
    """Write the logs of such a run, which samples one completion again and again."""
    sample = {"answer": "2", "completions": [{"completion": completion}]}
    files.append(folder / "samples.jsonl", *[sample] * 10)
    files.write(folder / "run.json", "{}")
    files.append(folder / "metrics.jsonl", *rows_of(first, **metrics))


FALLS = [0.3] * 5 + [0.1] * 5
RISES = [0.1] * 5 + [0.8] * 5
CUT, LARGE = "Answers are cut off", "The updates are too large"
NO_ANSWER = {"unreadable": 0.6, "no_signal/a": 1.0}


@pytest.mark.parametrize("metrics, what", [
    *(({name: [*[0.0] * 9, value]}, what) for name, value, what in (
        ("kl_old", 0.09, None), ("kl_old", 0.11, LARGE), ("kl", 9.0, None), ("kl", 11.0, LARGE))),
    ({"grad_norm": [1.0] * 9 + [90.0]}, None), ({"grad_norm": [1.0] * 9 + [110.0]}, LARGE),
    ({"entropy": FALLS}, None),
    ({"entropy": FALLS, "no_signal": RISES}, "The entropy collapses"),
    ({"entropy": FALLS, "no_signal": RISES, "accuracy": RISES}, None),
    ({"truncated": 0.11, "accuracy": 0.4}, CUT),
    ({"truncated": 0.09, "accuracy": 0.4}, None),
    ({"truncated": 0.15, "accuracy": RISES}, None),  # it may begin so, and rise
    ({"truncated": 0.25, "accuracy": [0.1] * 5 + [0.3] * 5}, CUT),
    ({"group_gap": 0.02, "sampler_gap": 0.6}, "A group is not one question"),
    ({"group_gap": 0.02, "sampler_gap": 0.02}, None),
    ({"group_gap": 0.0, "sampler_gap": 0.6}, "Sampler and trainer disagree"),
    ({"accuracy": [0.6] * 5 + [0.5] * 5}, "The run ends below its start: sampled accuracy 0.6"),
])
def test_the_limits_one_by_one(metrics, what, tmp_path):
    logged(tmp_path, **metrics)
    findings, *looked = doctor.diagnosis(tmp_path)
    if what:
        named_first(findings, what)
    else:
        said = nothing_found(*looked)
        assert not findings and said.startswith("Nothing was found in 10 steps: accuracy")


@pytest.mark.parametrize("metrics, what", [
    (NO_ANSWER | {"accuracy": 0.0}, "In most completions no answer is found"),
    (NO_ANSWER | {"accuracy": 0.05}, "In most completions no answer is found"),
    (NO_ANSWER | {"accuracy": 0.0, "unreadable": 0.4}, "The questions are too hard"),
    # its reward reads otherwise
    (NO_ANSWER | {"accuracy": 0.15, "unreadable": 1.0}, "A question is always right or always"),
    ({"accuracy": [0.0] * 5 + [0.15] * 5, "unreadable": 0.9}, None),  # it learns to answer
])  # fmt: skip
def test_completions_without_an_answer_are_not_called_wrong(metrics, what, tmp_path):
    logged(tmp_path, "12", **metrics)
    findings = doctor.diagnosis(tmp_path)[0]
    assert [what and finding.startswith(what) for finding in findings] == [True] * bool(what)


QWEN3 = "<think>so</think>\n\n\n<answer>2</answer>"


@pytest.mark.parametrize("reward, completion, what", [
    ("format_reward", QWEN3,
     "has '\\n\\n\\n' in place of a newline between '</think>' and '<answer>'"),
    ("format_reward", "Yes. <think>so</think>\n<answer>2</answer>", "has 'Yes. ' before '<think>'"),
    ("format_reward", "<think>so</think>\n<answer>2</answer>.", "has '.' after '</answer>'"),
    ("format_reward", "<think>so</think> it is 2", "has no '<answer>' after '</think>'"),
    ("format_reward", "<think>so<think></think>\n<answer>2</answer>", "has a mark twice"),
    ("soft_format_reward", "<answer>2</answer>", "has no '<think>'"),
    ("code_format", "<think>so</think>\n```python\n2", "has no '\\n```' after '```python\\n'"),
])  # fmt: skip
def test_a_form_that_is_never_met_is_shown_by_the_nearest_completion(
    reward, completion, what, tmp_path
):
    """Also if the accuracy rises."""
    logged(tmp_path, "2", accuracy=RISES, **{f"reward/{reward}": 0.0})
    sample = {"answer": "2", "completions": [{"completion": text} for text in ("2", completion)]}
    files.append(tmp_path / "samples.jsonl", sample)
    [finding] = doctor.diagnosis(tmp_path)[0]
    assert finding.startswith(f"The format is never met. The nearest completion {what}. Seen in 10")
    assert f"as {completion!r}" in finding


def test_a_form_that_is_met_once_or_not_known_is_no_finding(tmp_path):
    logged(tmp_path, accuracy=RISES, **{
        "reward/format_reward": [0.0] * 9 + [0.1], "reward/my_format": 0.0})
    assert doctor.diagnosis(tmp_path)[0] == []


@pytest.mark.parametrize("after, healthy", [(0.40, True), (0.35, False)])
def test_a_run_whose_evaluation_ends_below_its_start_is_never_healthy(after, healthy, tmp_path):
    """Though the accuracy of the samples rises."""
    logged(tmp_path, accuracy=RISES)
    scores = {"before": {"greedy": {"accuracy": 0.393}}, "after": {"greedy": {"accuracy": after}}}
    files.write(tmp_path / "summary.json", files.as_json(scores))
    findings = doctor.diagnosis(tmp_path)[0]
    said = "The run ends below its start: greedy accuracy 0.393 → 0.350. Seen in 10 steps: "
    assert not findings if healthy else findings[-1].startswith(said)


def test_a_rise_is_more_than_the_steps_vary():
    for values, rises in [([0.1, 0.2] * 3 + [0.1, 0.3] * 2, False),
                          ([0.1, 0.2] * 2 + [0.3] * 6, True),
                          ([0.5] * 10, False), ([0.3] * 4 + [0.1] * 6, False)]:
        assert doctor.metrics_of(rows_of(accuracy=values))["accuracy"].rises == rises


@pytest.mark.parametrize("words, what", [
    ("--rewards own:zero", "The reward never fires"),
    ("--lr 1e9 --rewards own:even", "Updates are skipped"),
])
def test_train_says_the_first_at_its_end_also_if_it_stops(words, what, found, capsys, tmp_path):
    findings = found(words)
    named_first(findings, what)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{findings[0]} More: python tools/doctor.py {tmp_path}/run"


def test_of_few_steps_it_says_that_they_are_few_and_what_it_looked_at(tmp_path, capsys):
    looked = ("reward_failures", "skipped_updates", "group_gap", "sampler_gap")
    zeros = dict.fromkeys(looked, 0.0)
    logged(tmp_path, accuracy=0.005, no_signal=0.9, **zeros)
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    main([str(tmp_path)])
    said = capsys.readouterr().out
    assert said.startswith("3 steps are too few to judge the accuracy: that takes 8. Only these ")
    assert all(f"{name} 0 → 0" in said for name in looked)
    assert "unreadable" not in said  # an earlier version did not measure it
    assert "Nothing was found" not in said


def test_a_healthy_run_and_a_folder_without_a_run(tmp_path, capsys):
    for words in ([], [str(tmp_path)], [str(tmp_path / "none")], ["--help"], ["a", "b"]):
        with pytest.raises(UserError, match="name the folder of a run"):
            main(words)
    logged(tmp_path, accuracy=[i / 10 for i in range(10)])
    main([str(tmp_path)])
    said = capsys.readouterr().out
    assert said.startswith("Nothing was found in 10 steps: accuracy 0.15 → 0.75")
    assert doctor.first_sentence(tmp_path / "none") is None
    assert doctor.first_sentence(tmp_path) == f"doctor    python tools/doctor.py {tmp_path}"
