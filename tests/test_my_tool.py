"""examples/my_tool.py: a calculator in a completion. What it computes and who wrote what; and a run
with it."""

import math
import random
import re
from copy import deepcopy

import pytest
import torch

import eval as evaluation
import train
from algorithms import resolve
from engine.base import files
from engine.model.loading import load_model
from engine.model.logprobs import Policy, completion_mask
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Sampling
from engine.report.metrics import tool_calls
from examples.my_tool import WithCalculator, answer_call, calculate
from experiments.library import toy_model
from loop.records import Parts
from loop.rollout import with_overlong_penalty
from loop.update import Limits
from rewards import number_accuracy, toy_accuracy
from tasks import toy_tool
from tests.helpers.examples import named
from tests.helpers.training import a_rollout, completion_logprobs, networks_around
from train import train_step

ROOM = Sampling(toy_tool.MAX_NEW_TOKENS)
pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("text, result", [
    ("27*43", "1161"), ("1161+16*12", "1353"), ("2*3+4", "10"), ("2-3-4", "-5"), ("2*3*4", "24"),
    ("7", "?"), ("1+2+3+4", "?"), ("9**9", "?"), ("-2*3", "?"), ("1234567*2", "?"), ("2*", "?"),
])
def test_the_calculator_computes_the_last_call_or_says_that_it_cannot(text, result):
    written = f"<tool>1*1</tool>...<tool>{text}</tool>"
    assert answer_call(written) == f"<result>{result}</result>"
    assert answer_call(f"{text}</tool>") == "<result>?</result>"  # without an opening tag


@pytest.fixture(scope="module")
def tokenizer():
    return toy_model.make_tokenizer("tool")


def test_a_tools_number_is_never_paid():
    text = "<tool>2*3</tool><result>6</result>"
    assert number_accuracy([text, text + "\n6"], ["6", "6"]) == [0, 1]
    assert number_accuracy(["<tool_response>\n6\n</tool_response>"], ["6"]) == [0]
    assert toy_accuracy([f"<result><answer>6</answer></result>{text}"], ["6"]) == [0]


@pytest.fixture(scope="module")
def base():
    return load_model(toy_tool.BASE, torch.device("cpu"))


@pytest.fixture(scope="module")
def questions(tokenizer):
    rows = [toy_tool.question(i) for i in range(24)]
    return [row | {"prompt": tokenizer(row["question"]).input_ids} for row in rows]


CALL = re.compile("<tool>([^<]*)</tool><result>([^<]*)</result>")


def test_the_base_calls_in_a_third_of_its_texts(base, questions):
    """logp is that of the whole completion with its results: the sampler computes it turn by turn,
    the scorer in one pass. Another rank draws the same for its share of the questions."""
    model, tokenizer = base
    sampler = WithCalculator(Sampler(model, tokenizer), tokenizer, ROOM)
    prompts = [question["prompt"] for question in questions]
    drawn = sampler.sample(prompts, 8, ROOM, seed=5)
    assert 0.2 < (tool_calls(drawn.mask) > 0).float().mean() < 0.5
    rows = [prompt for prompt in prompts for _ in range(8)]
    with torch.no_grad():
        logp = completion_logprobs(model, rows, drawn.tokens, drawn.mask)
    torch.testing.assert_close(logp * drawn.mask, drawn.logp, rtol=0, atol=1e-4)

    some = sampler.sample([prompts[3], prompts[17]], 8, ROOM, seed=5, places=[3, 17])
    texts = drawn.texts(tokenizer)
    found = [call for text in texts for call in CALL.findall(text)]
    assert len(found) > 50 and all(calculate(call) == result for call, result in found)
    by_tool = drawn.tokens[~drawn.mask & completion_mask(drawn.tokens, drawn.lengths)]
    assert set(tokenizer.decode(by_tool)) <= set("<result>/0123456789-?")
    assert tool_calls(some.mask).sum() > 3
    assert some.texts(tokenizer) == texts[24:32] + texts[136:144]
    assert len(sampler.sample([], 8, ROOM, seed=5).tokens) == 0  # a rank without a question


class Unsure(WithCalculator):
    """Nobody knows the log-probability of a tool's token. drawn: what was drawn last."""

    def sample(self, *given):
        self.drawn = super().sample(*given)
        self.drawn.logp[~self.drawn.mask] = math.nan
        return self.drawn


def test_only_the_tokens_of_the_policy_are_trained_on_and_counted(base, questions):
    """Some completions end within a result. (tests/test_update.py: the update of completions with
    such tokens is that of a plain loop.)"""
    model, tokenizer = base
    networks = networks_around(Policy(deepcopy(model)), tokenizer, lr=0.1)
    networks.sampler = sampler = Unsure(networks.sampler, tokenizer, ROOM)
    algorithm = resolve("cppo", group_size=8, pruning_rate=0.5, mu=1, beta=0.0)
    limits = Limits(micro_batch_tokens=64)  # several micro-batches
    reward = named(lambda *_, **columns: [*range(8)] * 2)
    parts = Parts(networks, algorithm, reward, Sampling(12), limits)
    step = train_step(parts, questions[:2], random.Random(1))
    drawn, metrics = sampler.drawn, step.metrics
    n = drawn.mask.sum(1)
    ends = drawn.mask.gather(1, drawn.lengths[:, None] - 1)
    assert not ends.all() and drawn.lengths.sum() > n.sum() + 10

    assert len(step.kept) == 8 and metrics["tokens_trained"] == n[step.kept].sum()
    assert metrics["tokens_generated"] == n.sum()
    surprise = -drawn.logp[drawn.mask].sum() / n.sum()
    assert metrics["entropy"] == pytest.approx(surprise.item(), rel=1e-4)
    # the sampler has read the tool's answers, and so has the scorer
    assert metrics["sampler_logp_diff_max"] < 1e-3 < metrics["grad_norm"]


def test_the_tokens_of_a_tool_count_as_length_and_a_call_ends_where_the_policy_writes_on():
    """Of 6 tokens at most: 5 in all, and 3 because it was cut off within a result."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0]]).bool()
    rollout = a_rollout([[1.0, 1]], [[3, 3]], mask=mask, truncated=torch.tensor([[False, True]]))
    assert tool_calls(mask).tolist() == [1, 0]
    assert with_overlong_penalty(rollout, 6, 4).rewards[-1].tolist() == [[-0.75, -1]]


def test_a_run_and_its_evaluation_call_the_tool(tmp_path):
    task = ["--sampler", "examples/my_tool.py:WithCalculator"]
    train.main([*task, "--dataset", "toy_tool", "--questions_per_step", "2", "--steps", "1",
                "--eval_questions", "16", "--output_dir", str(tmp_path)])
    [row] = files.read_lines(tmp_path / "metrics.jsonl")
    assert row["tool_calls"] > 0.2 and "<result>" in (tmp_path / "samples.jsonl").read_text()

    evaluation.main(
        [*task, "--model", str(tmp_path), "--benchmark", "toy_tool", "--questions", "16"])
    answers = files.read_lines(tmp_path / "eval-toy_tool.jsonl")[1:]
    called = [row for row in answers if "<result>" in row["completion"]]
    for row in called:  # without the tool's tokens, with the EOS
        own = re.sub(r"<result>.*?</result>", "", row["completion"])
        ids = toy_model.make_tokenizer("tool")(own).input_ids
        assert row["truncated"] or row["tokens"] == len(ids) + 1
    assert called
