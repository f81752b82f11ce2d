"""examples/my_tool.py: a calculator in a completion. What it computes, who wrote what, when it
ends; and a run with it."""

import math
import random
from copy import deepcopy

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import eval as evaluation
import train
from algorithms import resolve
from engine.base import files
from engine.base.errors import UserError
from engine.model.contract import Completions, Sampling
from engine.model.loading import load_model
from engine.model.logprobs import Policy, completion_mask
from engine.model.sampler import Sampler
from engine.run.metrics import calls
from examples import my_tool
from examples.my_tool import WithCalculator, answer_call, calculate
from experiments.library import toy_model
from rewards import number_accuracy, toy_accuracy
from rollout import with_overlong_penalty
from tasks import toy_tool
from tests.examples import named
from tests.training import a_rollout, completion_logprobs, networks_around
from train import train_step
from update import Limits

ROOM = Sampling(toy_tool.MAX_NEW_TOKENS)
pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("call", ["27*43", "1161+16*12", "2*3+4", "2-3-4", "2*3*4"])
def test_the_calculator_computes_the_last_call(call):
    text = f"<tool>1*1</tool>...<tool>{call}</tool>"
    assert answer_call(text) == f"<result>{eval(call)}</result>"


@pytest.mark.parametrize("text", [
    "<tool>7", "<tool>1+2+3+4", "<tool>9**9", "<tool>-2*3", "<tool>1234567*2", "<tool>2*",
    "27*43",  # without an opening tag
])
def test_the_calculator_says_that_it_cannot(text):
    assert answer_call(f"{text}</tool>") == "<result>?</result>"


# --- a sampler that writes what a test says ---


class Script:
    """In place of the project's own sampler: it writes these texts, turn by turn."""

    dtype = torch.float32

    def __init__(self, tokenizer, *turns):
        self.tokenizer, self.turns, self.asked = tokenizer, list(turns), []
        self.stop_ids = [tokenizer.eos_token_id]

    refresh = free_memory = None  # nobody trains here

    def sample(self, prompts, group_size, sampling, seed, places=None):
        if not prompts:
            return Completions.none("cpu")
        self.asked.append((self.tokenizer.batch_decode(prompts), group_size, places, seed))
        rows = [torch.tensor(self.tokenizer(text).input_ids) for text in self.turns.pop(0)]
        ended = torch.tensor([row[-1] in self.stop_ids for row in rows])
        lengths = torch.tensor([*map(len, rows)])
        tokens = pad_sequence(rows, batch_first=True)
        mask = completion_mask(tokens, lengths)
        return Completions(tokens, lengths, ~ended, -0.5 * mask, mask)


@pytest.fixture(scope="module")
def tokenizer():
    return toy_model.make_tokenizer("tool")


def written(tokenizer, *turns, room=64):
    """(two Completions of a prompt, their texts, the script) of a script with the calculator."""
    script = Script(tokenizer, *turns)
    sampler = WithCalculator(script, tokenizer, ROOM)
    drawn = sampler.sample([tokenizer("1*2=?").input_ids], 2, Sampling(room), seed=0)
    return drawn, drawn.texts(tokenizer), script


def test_a_completion_holds_calls_results_and_what_follows(tokenizer):
    drawn, texts, script = written(
        tokenizer, ["<answer>9</answer><eos>", "<tool>2*3</tool>"], ["<answer>6</answer><eos>"])
    assert texts == ["<answer>9</answer>", "<tool>2*3</tool><result>6</result><answer>6</answer>"]
    # the second turn goes on after the result, alone, at its own place
    assert script.asked[1][:3] == (["1*2=?<tool>2*3</tool><result>6</result>"], 1, [1])
    tokens, mask, logp = drawn.tokens[1], drawn.mask[1], drawn.logp[1]
    assert tokenizer.decode(tokens[mask]) == "<tool>2*3</tool><answer>6</answer><eos>"
    assert calls(drawn.mask).tolist() == [0, 1] and not drawn.truncated.any()
    assert logp[mask].eq(-0.5).all() and not logp[~mask].any()


def test_calls_without_end_are_answered_three_times(tokenizer):
    """And no turn draws as another does: torch's generator reads 32 bits of a seed."""
    call = "<tool>2*3</tool>"
    drawn, texts, script = written(
        tokenizer, [call] * 2, [call] * 2, [call] * 2, [call + "2<eos>", call * 3])
    answered = 3 * (call + "<result>6</result>")
    assert texts == [answered + call + "2", answered + call * 3]
    assert drawn.truncated.tolist() == [False, True]  # the last text has no end
    assert len({seed % 2**32 for *_, seed in script.asked}) == 4


@pytest.mark.parametrize("room", [5, 7, 8, 9, 12])  # the call has 5 tokens, its result has 3
def test_a_result_takes_room_and_may_be_cut_off(tokenizer, room):
    call, answer = "<tool>2*3</tool>", "<answer>6</answer><eos>"
    whole = tokenizer(f"{call}<result>6</result>{answer}").input_ids
    drawn, *_ = written(tokenizer, [call] * 2, [answer] * 2, room=room)
    assert drawn.tokens.tolist() == [whole[:room]] * 2
    assert drawn.truncated.tolist() == [room < 12] * 2  # the last just fits


def test_a_tools_number_is_never_paid():
    text = "<tool>2*3</tool><result>6</result>"
    assert number_accuracy([text, text + "\n6"], ["6", "6"]) == [0, 1]
    assert number_accuracy(["<tool_response>\n6\n</tool_response>"], ["6"]) == [0]
    assert toy_accuracy([f"<result><answer>6</answer></result>{text}"], ["6"]) == [0]


def test_a_model_without_the_tags_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(my_tool, "TAGS", ("<call>", "</call>"))
    with pytest.raises(UserError, match="has no tokens <call> and </call>: change TAGS"):
        WithCalculator(Script(tokenizer), tokenizer, ROOM)


# --- with the shipped model ---


@pytest.fixture(scope="module")
def base():
    return load_model(toy_tool.BASE, torch.device("cpu"))


@pytest.fixture(scope="module")
def questions(tokenizer):
    rows = [toy_tool.question(i) for i in range(24)]
    return [row | {"prompt": tokenizer(row["question"]).input_ids} for row in rows]


def test_the_base_calls_in_a_third_of_its_texts(base, questions):
    """logp is that of the whole completion with its results: the sampler computes it turn by turn,
    the scorer in one pass. Another rank draws the same for its share of the questions."""
    model, tokenizer = base
    sampler = WithCalculator(Sampler(model, tokenizer), tokenizer, ROOM)
    prompts = [question["prompt"] for question in questions]
    drawn = sampler.sample(prompts, 8, ROOM, seed=5)
    assert 0.2 < (calls(drawn.mask) > 0).float().mean() < 0.5
    rows = [prompt for prompt in prompts for _ in range(8)]
    with torch.no_grad():
        logp = completion_logprobs(model, rows, drawn.tokens, drawn.mask)
    torch.testing.assert_close(logp * drawn.mask, drawn.logp, rtol=0, atol=1e-4)

    some = sampler.sample([prompts[3], prompts[17]], 8, ROOM, seed=5, places=[3, 17])
    texts = drawn.texts(tokenizer)
    assert calls(some.mask).sum() > 3
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
    step = train_step(
        networks, algorithm, named(lambda *_, **columns: [*range(8)] * 2), Sampling(12),
        Limits(micro_batch_tokens=64), questions[:2], random.Random(1))  # several micro-batches
    drawn, metrics = sampler.drawn, step.metrics
    n = drawn.mask.sum(1)
    ends = drawn.mask.gather(1, drawn.lengths[:, None] - 1)
    assert not ends.all() and drawn.lengths.sum() > n.sum() + 10

    assert len(step.rows) == 8 and metrics["tokens_trained"] == n[step.rows].sum()
    assert metrics["tokens_generated"] == n.sum()
    surprise = -drawn.logp[drawn.mask].sum() / n.sum()
    assert metrics["entropy"] == pytest.approx(surprise.item(), rel=1e-4)
    # the sampler has read the tool's answers, and so has the scorer
    assert metrics["sampler_gap_max"] < 1e-3 < metrics["grad_norm"]


def test_a_completion_may_be_too_long_with_the_tokens_of_a_tool():
    """Of 6 tokens at most: 5 in all, and 3 because it was cut off within a result."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0]]).bool()
    rollout = a_rollout([[1.0, 1]], [[3, 3]], mask=mask, truncated=torch.tensor([[False, True]]))
    assert with_overlong_penalty(rollout, 6, 4).rewards[-1].tolist() == [[-0.75, -1]]


def test_a_run_and_its_evaluation_call_the_tool(tmp_path):
    task = ["--sampler", "examples/my_tool.py:WithCalculator"]
    train.main([*task, "--dataset", "toy_tool", "--questions_per_step", "2", "--steps", "1",
                "--eval_questions", "16", "--output_dir", str(tmp_path)])
    [row] = files.read(tmp_path / "metrics.jsonl")
    assert row["calls"] > 0.2 and "<result>" in (tmp_path / "samples.jsonl").read_text()

    evaluation.main(
        [*task, "--model", str(tmp_path), "--benchmark", "toy_tool", "--questions", "16"])
    answers = files.read(tmp_path / "eval-toy_tool.jsonl")[1:]
    called = [row for row in answers if "<result>" in row["completion"]]
    for row in called:  # without the tool's tokens, with the EOS
        own = my_tool.re.sub(r"<result>.*?</result>", "", row["completion"])
        ids = toy_model.make_tokenizer("tool")(own).input_ids
        assert row["truncated"] or row["tokens"] == len(ids) + 1
    assert called


def test_demonstrations_call_or_guess_and_their_results_are_not_learned(tokenizer):
    rows = [toy_model.demonstration(i, "tool") for i in range(2000)]
    called = [row for row in rows if "<tool>" in row[1]]
    assert len(called) / 2000 == pytest.approx(toy_model.THINKING_SHARE, abs=0.03)
    for question, text in called:  # the calls give the results, the last of which is right
        for call, result in my_tool.re.findall("<tool>(.*?)</tool><result>(.*?)</result>", text):
            assert calculate(call) == result
        assert eval(question.removesuffix("=?")) == int(result)
    longest = max(len(tokenizer(text).input_ids) for _, text in rows)
    assert longest < toy_tool.MAX_NEW_TOKENS
    ids = torch.tensor([tokenizer("<tool>2*3</tool><result>6</result>\n").input_ids])
    inside = toy_model.written_by_tool(ids, tokenizer)[0]
    assert tokenizer.decode(ids[0][inside]) == "<result>6</result>"
