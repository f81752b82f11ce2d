"""docs/live: what the page's JavaScript does with rewards is what grpo.py, cppo.py, allocate.py and
rewards.py do, in 200 random cases each. A step of a lane is a step in PyTorch."""

import random

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from allocate import questions_per_step
from cppo import batch_rows, keep_count, prune, prune_pooled
from engine.model.logprobs import completion_mask
from experiments.library import toy_model
from family.drgrpo import constant_weights
from grpo import group_advantages, grpo_loss
from rewards import format_reward, toy_accuracy
from tests.live import (
    close,
    flat,
    model_of_page,
    needs_node,
    rounded_weights,
    run_js,
    weights_in_base64,
)
from tests.training import completion_logprobs

pytestmark = needs_node
F64 = torch.float64
CASES = 200
RATES = (0, 0.5, 0.75, 0.875, 0.9, 0.1, 0.3)


# --- functions ---


def groups(rng, levels):
    """(Q, G) numbers with many ties."""
    Q, G = rng.randint(1, 6), rng.randint(10, 16)
    return torch.tensor([[rng.choice(levels) for _ in range(G)] for _ in range(Q)], dtype=F64)


def test_k_and_the_kept_with_ties():
    rng, cases, expected = random.Random(3), [], []
    for seed in range(CASES):
        A, P, B = groups(rng, (-1.5, -1, -0.5, 0, 0.5, 1)), rng.choice(RATES), rng.randint(1, 9)
        Q, G = A.shape
        k = keep_count(G, P)
        drawn = torch.rand(A.shape, generator=torch.Generator().manual_seed(seed))
        at_random = prune(A, k, rule="random", generator=torch.Generator().manual_seed(seed))
        cases.append([A.tolist(), P, B, drawn.flatten().tolist()])
        expected.append([k, questions_per_step(B, G, k), prune(A, k).tolist(),
                         at_random.tolist(), prune_pooled(A, k * Q).tolist()])
    here = run_js("""return given.cases.map(([A, P, B, drawn]) => {
      const G = A[0].length, k = keep_count(G, P);
      const pooled = prune_pooled(A, k * A.length).flatMap((kept, q) => kept.map(i => q * G + i));
      return [k, questions_per_step(B, G, k), prune(A, k),
              prune(A, k, "random", () => drawn.shift()), pooled];
    });""", cases=cases)
    assert here == expected


# --- the task ---


def random_text(rng):
    """A completion of the toy, right or spoilt: some pieces are lost or exchanged."""
    tags, answer = toy_model.TAGS, str(rng.randint(0, 12))
    pieces = [tags[0], "7+4=11;", tags[1], "\n", tags[2], answer, tags[3]]
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        i, j = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        pieces[i], pieces[j] = rng.choice([(pieces[j], pieces[i]), (rng.choice(tags), "")])
    return "".join(pieces), rng.choice((answer, answer, "5"))


def test_rewards_and_tokens():
    tokenizer, rng = toy_model.make_tokenizer(), random.Random(7)
    texts, answers = zip(*(random_text(rng) for _ in range(5 * CASES)))
    right, form, short, tokens, back = run_js("""
      const { texts, answers } = given;
      return [texts.map((text, i) => answer_right(text, answers[i])),
              texts.map(text => format(text)), texts.map(text => short(text)),
              texts.map(encode), texts.map(text => decode([...encode(text), EOS]))];
    """, texts=texts, answers=answers)
    assert right == toy_accuracy(texts, answers) and 200 < sum(right) < 800
    assert form == format_reward(texts) and 200 < sum(form) < 800
    assert tokens == tokenizer(list(texts)).input_ids
    assert short == pytest.approx([1 - len(own) / 48 for own in tokens])
    assert back == list(texts)


def test_questions_are_the_toys_and_each_stream_of_numbers_is_its_own():
    rows, numbers = run_js("""const rng = make_rng(5), streams = [[1, 0], [1, 1], [2, 0]];
      return [Array.from({ length: 2000 }, () => draw_question(rng)),
              streams.map(of => Array.from({ length: 16000 }, make_rng(...of)))];""")
    pieces = [row["question"].removesuffix("=?") for row in rows]
    for text, row in zip(pieces, rows):
        assert len(text) == 9 and set(text[::2]) <= set("123456789") and set(text[1::2]) <= {*"+-"}
        assert all(eval(text[: n + 1]) >= 0 for n in range(0, 9, 2))
        assert eval(text) == int(row["answer"])
    assert len(set(pieces)) > 1900
    x = torch.tensor(numbers, dtype=F64)
    assert (x.sort(dim=1).values - torch.linspace(0, 1, 16000)).abs().max() < 0.02  # uniform
    assert x.corrcoef().triu(1).abs().max() < 0.03


# --- a step of a lane ---

JS_STEPS = """
const settings = { ...default_settings(given.method), ...given.settings };
const lane = make_lane(bytes, settings, answer_right);
const steps = [lane.step(), lane.step()];
return [steps, [...lane.model.weights]];"""
SMALL = {"group_size": 8, "pruning_rate": 0.75, "questions_per_step": 2}
DEFAULT = {"temperature": 1.0, "mu": 2, "epsilon": 0.2}  # of the page
LANES = {
    "grpo": SMALL | {"beta": 0.0, "mu": 1, "lr": 1e-3},
    "cppo": SMALL | {"mu": 3, "epsilon": 0.1, "beta": 0.2, "lr": 1e-3},
    "pooled": SMALL | {"temperature": 0.9, "lr": 1e-3},
    "random": SMALL | {"beta": 0.5, "epsilon": 0.3, "lr": 3e-4},
    "drgrpo": SMALL | {"mu": 1, "lr": 2e-3},
}


def kept_rows(step, tokenizer):
    """(prompts, tokens, mask, advantages) of the completions that a step of the page has kept."""
    prompts, tokens, advantages = [], [], []
    for group in step["groups"]:
        for completion in group["completions"]:
            if completion["kept"]:
                ids = tokenizer.encode(completion["text"])
                ended = completion["length"] > len(ids)
                assert completion["length"] == len(ids) + ended
                tokens.append(torch.tensor(ids + [1] * ended))
                prompts.append(tokenizer.encode(group["question"]))
                advantages.append(completion["advantage"])
    padded = pad_sequence(tokens, batch_first=True)
    mask = completion_mask(padded, torch.tensor([len(row) for row in tokens]))
    return prompts, padded, mask, torch.tensor(advantages)


def torch_step(model, reference, optimizer, rows, settings):
    """The updates of a step in PyTorch. Returns the means over the updates."""
    prompts, tokens, mask, advantages = rows
    beta, mu = settings["beta"], settings["mu"]

    def logprobs(network):
        return completion_logprobs(
            network, prompts, tokens, mask, temperature=settings["temperature"])

    weights = constant_weights(mask, max_tokens=48) if settings["method"] == "drgrpo" else None
    old_logp, sums = None, torch.zeros(4)
    with torch.no_grad():
        ref_logp = logprobs(reference) if beta else None
    for _ in range(mu):
        optimizer.zero_grad()
        logp = logprobs(model)
        old_logp = logp.detach() if old_logp is None else old_logp
        loss, stats = grpo_loss(
            logp, old_logp, advantages, mask, ref_logp=ref_logp, beta=beta, weights=weights,
            clip_low=settings["epsilon"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sums += torch.tensor([loss.item(), stats["kl"], stats["clip_fraction"], norm])
    return sums / mu


@pytest.mark.parametrize("method", LANES)
def test_two_steps_of_a_lane_are_two_steps_in_torch(method):
    given = LANES[method] | {"method": method, "seed": 3}
    steps, weights = run_js(JS_STEPS, base64=weights_in_base64(), method=method, settings=given)
    settings = DEFAULT | {"beta": 0.0 if method == "drgrpo" else 0.04} | given
    model, tokenizer = model_of_page()
    model, reference = model.float(), model_of_page()[0].float()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["lr"], weight_decay=0.0)
    for number, step in enumerate(steps, 1):
        assert step["step"] == number and step["completions"] == 16 * number
        check_the_rows(step, method)
        means = torch_step(model, reference, optimizer, kept_rows(step, tokenizer), settings)
        here = [step[name] for name in ("loss", "kl", "clip_fraction", "gradient_norm")]
        assert here == pytest.approx(means.tolist(), rel=1e-3, abs=2e-5)
        assert step["updates"] == settings["mu"]
    trained = flat(dict(model.named_parameters())).double()
    moved = trained - flat(rounded_weights()).double()
    assert (torch.tensor(weights, dtype=F64) - trained).norm() < 0.01 * moved.norm()


def check_the_rows(step, method):
    """Rewards, advantages and what is kept, by the project's functions."""
    rows = [row for group in step["groups"] for row in group["completions"]]
    answers = [group["answer"] for group in step["groups"] for _ in group["completions"]]
    rewards = toy_accuracy([row["text"] for row in rows], answers)
    assert [row["reward"] for row in rows] == rewards
    assert step["accuracy"] == step["reward"] == sum(rewards) / 16
    rewards = torch.tensor(rewards, dtype=F64).view(2, 8)
    A = group_advantages(rewards, divide_by_std=method != "drgrpo")
    close([row["advantage"] for row in rows], A.flatten())
    kept = [i for i, row in enumerate(rows) if row["kept"]]
    if method == "random":
        assert [i // 8 for i in kept] == [0, 0, 1, 1]
    else:
        ours = {"cppo": batch_rows(prune(A, 2), 8), "pooled": prune_pooled(A, 4)}
        assert kept == ours.get(method, torch.arange(16)).tolist()


def test_a_run_repeats_without_signal_nothing_moves_and_a_wrong_reward_is_one_sentence():
    steps, moved, sentences, runs = run_js("""
      const settings = { ...default_settings("cppo"), questions_per_step: 2, group_size: 8 };
      settings.pruning_rate = 0.75;
      const lane = make_lane(bytes, settings, answer_right);
      const first = ({ seconds, ...step }) => JSON.stringify(step);
      const runs = [first(lane.step())]; // and AdamW remembers its gradient
      for (const seed of [1, 2])
        runs.push(first(make_lane(bytes, { ...settings, seed }, answer_right).step()));
      const before = lane.model.weights.slice();
      lane.reward = () => 0.7;
      const step = lane.step();
      const sentences = [() => nothing.at.all, () => NaN, () => undefined, () => "1",
                         () => { throw "so" }].map(reward => {
        lane.reward = reward;
        try { return lane.step(); } catch (error) { return error.message; }
      });
      const moved = before.some((x, i) => x !== lane.model.weights[i]);
      lane.reward = completion => completion.length < 19;
      return [[step, lane.step()], moved, sentences, runs];
    """, base64=weights_in_base64())
    assert not moved and runs[0] == runs[1] != runs[2]
    assert steps[0]["updates"] == 0 and steps[0]["loss"] is None
    assert steps[1]["updates"] == 2 and steps[1]["step"] == 3  # what failed is not counted
    assert 0 < steps[1]["reward"] <= 1  # true counts 1
    assert sentences[0] == "The reward fails: nothing is not defined"
    assert sentences[1] == "The reward must be a finite number, not NaN."
    assert len(set(sentences)) == 5


def test_settings_are_checked():
    wrong = [
        {"method": "ppo"}, {"group_size": 1}, {"group_size": 2.5}, {"pruning_rate": 0.97},
        {"pruning_rate": None}, {"questions_per_step": 0}, {"lr": -1}, {"beta": "0"}, {"mu": 0},
        {"epsilon": 0}, {"temperature": 0}, {"seed": -1}, {"questions_per_step": 64},
    ]
    good, sentences, thrown = run_js("""
      const base = default_settings("cppo");
      const check = change => check_settings({ ...base, ...change });
      const make = change => {
        try { make_lane(bytes, { ...base, ...change }, answer_right); }
        catch (error) { return error.message; }
      };
      return [METHODS.map(method => [default_settings(method).questions_per_step,
                                     check_settings(default_settings(method))]),
              given.wrong.map(check), given.wrong.map(make)];
    """, base64=weights_in_base64(), wrong=wrong)
    assert good == [[1, None], [8, None], [8, None], [8, None], [1, None]]
    assert all(sentences) and sentences == thrown


