"""examples/my_tool.py: a calculator in a completion. What it computes, who wrote what, when it
ends; and a run with it, which is killed and resumed."""

import math
import random
import shutil
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file

import eval as evaluation
import train
from algorithms import resolve
from engine.base import files
from engine.base.errors import UserError
from engine.model.contract import Completions, Sampling
from engine.model.loading import load_model
from engine.model.logprobs import Policy, completion_mask
from engine.model.sampling import Sampler
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

TOOL = "examples/my_tool.py:WithCalculator"
ROOM = Sampling(toy_tool.MAX_NEW_TOKENS)
pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("call, result", [
    ("27*43", "1161"), ("1161+16*12", "1353"), ("2*3+4", "10"), ("2-3-4", "-5"), ("2*3*4", "24"),
    ("7", "?"), ("1+2+3+4", "?"), ("9**9", "?"), ("-2*3", "?"), ("1234567*2", "?"), ("2*", "?"),
])
def test_the_calculator_computes_or_says_that_it_cannot(call, result):
    assert calculate(call) == result
    assert answer_call(f"<tool>1*1</tool>...<tool>{call}</tool>") == f"<result>{result}</result>"


def test_a_call_without_an_opening_tag_is_malformed():
    assert answer_call("27*43</tool>") == "<result>?</result>"


# --- a sampler that writes what a test says ---


class Script:
    """In place of the project's own sampler: it writes these texts, turn by turn."""

    dtype = torch.float32

    def __init__(self, tokenizer, *turns):
        self.tokenizer, self.turns, self.asked, self.seeds = tokenizer, list(turns), [], []
        self.stop_ids = [tokenizer.eos_token_id]

    refresh = free_memory = None  # nobody trains here

    def sample(self, prompts, group_size, sampling, seed, places=None):
        if not prompts:
            return Completions.none("cpu")
        self.asked.append((self.tokenizer.batch_decode(prompts), group_size, places))
        self.seeds.append(seed)
        rows = [self.tokenizer(text).input_ids for text in self.turns.pop(0)]
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        ended = torch.tensor([row[-1] in self.stop_ids for row in rows])
        mask = completion_mask(tokens, lengths)
        return Completions(tokens, lengths, ~ended, -0.5 * mask.float(), mask)


@pytest.fixture(scope="module")
def tokenizer():
    return toy_model.make_tokenizer("tool")


def written(tokenizer, *turns, room=64, prompts=("1*2=?",), group_size=2):
    """(Completions, their texts, the script) of a script with the calculator."""
    script = Script(tokenizer, *turns)
    sampler = WithCalculator(script, tokenizer, Sampling(room))
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    drawn = sampler.sample(ids, group_size, Sampling(room), seed=0)
    return drawn, drawn.texts(tokenizer), script


def test_a_completion_holds_calls_results_and_what_follows(tokenizer):
    drawn, texts, script = written(
        tokenizer, ["<answer>9</answer><eos>", "<tool>2*3</tool>"], ["<answer>6</answer><eos>"])
    assert texts == ["<answer>9</answer>", "<tool>2*3</tool><result>6</result><answer>6</answer>"]
    # the second turn goes on after the result, alone, at its own place
    assert script.asked[1] == (["1*2=?<tool>2*3</tool><result>6</result>"], 1, [1])
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
    assert len({seed % 2**32 for seed in script.seeds}) == 4


def test_a_result_takes_room_and_may_be_cut_off(tokenizer):
    call = ["<tool>2*3</tool>"] * 2  # 5 tokens; the result has 3, and the answer with its EOS 4
    whole = "<result>6</result><answer>6</answer>"
    cut = [(5, ""), (7, "<result>6"), (8, "<result>6</result>"), (9, "<result>6</result><answer>")]
    for room, more in [*cut, (12, whole)]:
        drawn, texts, _ = written(tokenizer, call, ["<answer>6</answer><eos>"] * 2, room=room)
        assert texts[0] == call[0] + more and drawn.tokens.shape[1] == room
        assert drawn.truncated.all() == drawn.truncated.any() == (room < 12)  # the last just fits
    nobody, *_ = written(tokenizer, prompts=())
    assert len(nobody.tokens) == 0


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


def prompts_of(tokenizer, n):
    return [tokenizer(toy_tool.question(i)["question"]).input_ids for i in range(n)]


def test_the_base_calls_in_a_third_of_its_texts_and_each_ranks_share_is_drawn_alike(base):
    model, tokenizer = base
    sampler = WithCalculator(Sampler(model, tokenizer), tokenizer, ROOM)
    prompts = prompts_of(tokenizer, 24)
    drawn = sampler.sample(prompts, 8, ROOM, seed=5)
    assert 0.2 < (calls(drawn.mask) > 0).float().mean() < 0.5
    # the questions 3 and 17 alone, as another rank would sample them
    some = sampler.sample([prompts[3], prompts[17]], 8, ROOM, seed=5, places=[3, 17])
    rows = [*range(24, 32), *range(136, 144)]
    width = some.tokens.shape[1]
    assert some.mask.sum() > 100 and calls(some.mask).sum() > 3
    assert torch.equal(some.tokens, drawn.tokens[rows, :width])
    assert torch.equal(some.mask, drawn.mask[rows, :width])


def test_logp_is_that_of_the_whole_completion_with_its_results(base):
    """The sampler computes it turn by turn; the scorer in one pass."""
    model, tokenizer = base
    prompts = prompts_of(tokenizer, 8)
    drawn = WithCalculator(Sampler(model, tokenizer), tokenizer, ROOM).sample(
        prompts, 4, ROOM, seed=6)
    assert calls(drawn.mask).sum() > 3
    with torch.no_grad():
        logp = completion_logprobs(
            model, [prompt for prompt in prompts for _ in range(4)], drawn.tokens, drawn.mask)
    torch.testing.assert_close(logp * drawn.mask, drawn.logp, rtol=0, atol=1e-4)


def place_in_group(completions, **columns):
    return [float(i % 8) for i in range(len(completions))]


def test_only_the_tokens_of_the_policy_are_trained_on_and_counted(base):
    """Some completions end within a result. Nobody knows the log-probability of a tool's token.
    (tests/test_update.py: the update of completions with such tokens is that of a plain loop.)"""
    model, tokenizer = deepcopy(base[0]), base[1]
    networks = networks_around(Policy(model), tokenizer, lr=0.1)
    sampler, found = WithCalculator(networks.sampler, tokenizer, ROOM), []

    def sample(*given):
        [drawn] = found[:] = [WithCalculator.sample(sampler, *given)]
        drawn.logp[~drawn.mask] = math.nan
        return drawn

    sampler.sample, networks.sampler = sample, sampler
    questions = [toy_tool.question(i) | {"prompt": prompt}
                 for i, prompt in enumerate(prompts_of(tokenizer, 2))]
    algorithm = resolve("cppo", group_size=8, pruning_rate=0.5, mu=1, beta=0.0)
    limits = Limits(micro_batch_tokens=64)  # several micro-batches
    step = train_step(networks, algorithm, named(place_in_group), Sampling(12), limits, questions,
                      random.Random(1))
    [drawn], metrics = found, step.metrics
    n = drawn.mask.sum(1)
    ends = drawn.mask.gather(1, drawn.lengths[:, None] - 1)
    assert n.all() and not ends.all() and drawn.lengths.sum() > n.sum() + 10

    assert torch.equal(step.rollout.lengths.flatten(), n) and len(step.rows) == 8
    assert metrics["tokens_trained"] == n[step.rows].sum()
    assert metrics["tokens_generated"] == n.sum() and metrics["length"] == n.sum() / 16
    surprise = -drawn.logp[drawn.mask].sum().item()
    assert metrics["entropy"] == pytest.approx(surprise / n.sum().item(), rel=1e-4)
    # the sampler has read the tool's answers, and so has the scorer
    assert metrics["sampler_gap_max"] < 1e-3 < metrics["grad_norm"]


def test_a_completion_may_be_too_long_with_the_tokens_of_a_tool():
    """Of 6 tokens at most: 5 in all, 3 in all, and one that was cut off within a result."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]).bool()
    rollout = a_rollout(
        [[1.0, 1, 1]], [[3, 3, 3]], mask=mask, truncated=torch.tensor([[False, False, True]]))
    penalised = with_overlong_penalty(rollout, 6, 4)
    assert penalised.rewards[-1].tolist() == [[-0.75, -0.25, -1]]


def test_a_run_learns_to_call_and_goes_on_exactly_after_a_kill(tmp_path):
    options = ["--dataset", "toy_tool", "--sampler", TOOL, "--questions_per_step", "2",
               "--eval_questions", "16", "--save_every", "1", "--steps", "2"]
    assert train.main([*options, "--output_dir", str(tmp_path / "run")]) == 0
    killed = tmp_path / "killed"  # as if step 2 had not been saved
    shutil.copytree(tmp_path / "run", killed)
    shutil.rmtree(killed / "checkpoint-000002")
    (killed / "summary.json").unlink()
    assert train.main(["--output_dir", str(killed), "--resume"]) == 0
    weights = [load_file(folder / "checkpoint-000002" / "model.safetensors")
               for folder in (tmp_path / "run", killed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    rows = files.read(killed / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["calls"] > 0.2
    samples = (killed / "samples.jsonl").read_text()
    assert "<result>" in samples

    evaluation.main(["--model", str(killed), "--benchmark", "toy_tool", "--questions", "16",
                     "--sampler", TOOL])
    answers = files.read(killed / "eval-toy_tool.jsonl")[1:]
    called = [row for row in answers if "<result>" in row["completion"]]
    for row in called:  # without the tool's tokens, with the EOS
        own = my_tool.re.sub(r"<result>.*?</result>", "", row["completion"])
        ids = toy_model.make_tokenizer("tool")(own).input_ids
        assert row["truncated"] or row["tokens"] == len(ids) + 1
    assert called


@pytest.mark.parametrize("sampler, message", [
    ("examples/my_tool.py:Nothing", "has no function 'Nothing'"),
    ("vlm", "--sampler: unknown sampler 'vlm': did you mean vllm"),
])
def test_a_sampler_that_is_not_there_is_refused(sampler, message):
    with pytest.raises(UserError, match=message):
        train.main(["--sampler", sampler])


def test_demonstrations_call_or_guess_and_their_results_are_not_learned(tokenizer):
    texts = [toy_model.demonstration(i, "tool") for i in range(2000)]
    called = [text for _, text in texts if "<tool>" in text]
    assert abs(len(called) / 2000 - toy_model.THINKING_SHARE) < 0.03
    for question, text in texts:
        if "<tool>" in text:  # its calls give its results, the last of which is right
            asked = my_tool.re.findall(r"<tool>(.*?)</tool><result>(.*?)</result>", text)
            assert all(calculate(call) == result for call, result in asked)
            assert eval(question.removesuffix("=?")) == int(asked[-1][1])
        assert len(tokenizer(text).input_ids) < toy_tool.MAX_NEW_TOKENS
    ids = torch.tensor([tokenizer("<tool>2*3</tool><result>6</result>\n").input_ids])
    inside = toy_model.written_by_tool(ids, tokenizer)[0]
    assert tokenizer.decode(ids[0][inside]) == "<result>6</result>"
