"""Evaluation: scores of known verdicts, estimators against enumeration, resuming, ranks, and the
comparison of two models."""

import itertools
import json
import math
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import eval as evaluation
from engine.base.errors import UserError
from engine.model.sampling import Sampler, Sampling
from engine.scoring.score import REWARDS
from engine.tasks.questions import load_questions
from engine.tasks.table import SYSTEM_PROMPT
from eval import interval, majority_is_right, paired, pass_at_k, summarize
from tests.engine.test_ranks import torchrun
from tests.engine.test_reward_model import make

ROOT = Path(__file__).parent.parent
OWN = ROOT / "examples/my_reward.py"


def always(answer):
    return lambda completions, **columns: [float(gold == answer) for gold in columns["answer"]]


def test_accuracy_is_the_share_of_right_completions(loaded, tmp_path):
    model, tokenizer = loaded
    questions, _ = load_questions("toy", tokenizer, split="test", limit=7)
    for i, row in enumerate(questions):
        row["answer"] = str(i % 2)  # 0 1 0 1 0 1 0
    # small batches, so that questions are cut into several
    path = tmp_path / "answers.jsonl"
    options = {"samples": 3, "batch_size": 6, "path": path}
    summary = evaluation.examine(
        Sampler(model, tokenizer), tokenizer, questions, always("1"), Sampling(8), **options
    )
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert summary["greedy"]["accuracy"] == summary["sampled"]["accuracy"] == pytest.approx(3 / 7)
    assert [r["index"] for r in records if r["part"] == "sampled"] == [
        i for i in range(7) for _ in range(3)
    ]
    assert all(r["correct"] == (r["index"] % 2 == 1) for r in records)
    lengths = [r["tokens"] for r in records if r["part"] == "greedy"]
    assert summary["greedy"]["length"] == pytest.approx(sum(lengths) / 7)
    # sampled, not repeated
    assert len({r["completion"] for r in records if r["part"] == "sampled" and r["index"] == 0}) > 1


def test_the_greedy_part_does_not_depend_on_the_seed_or_the_batch(loaded):
    model, tokenizer = loaded
    questions, _ = load_questions("toy", tokenizer, split="test", limit=9)
    texts = []
    for seed, size in [(1, 2), (2, 9)]:
        greedy = Sampling(48, temperature=0.0)
        records = evaluation.evaluate(
            Sampler(model, tokenizer), tokenizer, questions, always("1"), greedy, batch_size=size,
            seed=seed,
        )
        texts.append([r["completion"] for r in records])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("n, right", [(1, 0), (4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, right):
    flags = [i < right for i in range(n)]
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(flags, k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("answers, right", [
    # of a tie the first
    (["5", "5", "7"], True), (["7", "7", "5"], False), (["5", "7"], True), (["7", "5"], False),
    (["5.0", "7", "5", "7", "$5"], True),  # equal numbers are one answer
    (["no answer", "no answer", "5"], True),  # none has no vote
    (["no answer"], False),
])
def test_the_majority(answers, right):
    records = [
        {
            "completion": a if "no" in a else f"<answer>{a}</answer>",
            "correct": a in ("5", "5.0", "$5"),
        }
        for a in answers
    ]
    assert majority_is_right(records) is right


def records_of(table):
    return [
        {"index": i, "completion": "", "correct": bool(c)}
        for i, row in enumerate(table)
        for c in row
    ]


def test_a_summary_of_known_verdicts():
    summary = summarize(records_of([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]))
    assert (
        summary["accuracy"] == 7 / 16
        and summary["pass@2"] == pytest.approx((1 / 2 + 1 + 0 + 5 / 6) / 4)
        and summary["pass@4"] == 3 / 4
    )
    assert (summary["questions"], summary["samples"]) == (4, 4)
    low, high = summary["intervals"]["accuracy"]
    assert 0 <= low < 7 / 16 < high <= 1


@pytest.mark.parametrize("scale", [1.0, 0.5])  # a share; an average over samples
def test_the_interval_is_that_of_the_normal_distribution_where_there_are_many_questions(scale):
    values = [scale * (random.Random(i).random() < 0.3) for i in range(2000)]
    mean = sum(values) / 2000 / scale
    low, high = interval(values)
    half = 1.96 * math.sqrt(mean * (1 - mean) / 2000)
    assert low == pytest.approx(scale * (mean - half), abs=2e-3) and high == pytest.approx(
        scale * (mean + half), abs=2e-3
    )


# method 3 in Newcombe, Statistics in Medicine 17 (1998), table I
@pytest.mark.parametrize("right, n, low, high", [
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718),
    (20, 20, 1 - 0.1611, 1.0),
])  # fmt: skip
def test_the_interval_of_a_share_is_wilsons(right, n, low, high):
    assert interval([i < right for i in range(n)]) == pytest.approx((low, high), abs=5e-5)


def test_no_interval_says_that_a_mean_is_known_for_certain():
    """Of 30 questions with the same score, a few in a hundred of all questions may still have
    another one."""
    few = 1.96**2 / (30 + 1.96**2)
    assert interval([0.5] * 30) == pytest.approx((0.5 - few / 2, 0.5 + few / 2))
    summary = summarize(records_of([[0, 0]] * 30))
    assert summary["accuracy"] == 0 and summary["intervals"]["accuracy"] == summary["intervals"][
        "pass@2"
    ] == pytest.approx((0, few))
    for first, second, bounds in [
        (0, 0, (-few, few)), (1, 1, (-few, few)), (0, 1, (1 - 2 * few, 1)),
        (1, 0, (-1, -1 + 2 * few)),
    ]:
        assert paired([first] * 30, [second] * 30)[1] == pytest.approx(bounds)
    # no share of questions: a difference may be -1, too
    low, high = paired([0] * 30, [1] * 10 + [0] * 20)[1]
    assert 0 < low < 1 / 3 < high < 0.6 and (low, high) != pytest.approx(
        interval([1] * 10 + [0] * 20)
    )


def test_the_paired_test_is_the_exact_one():
    """5 questions got better and 1 worse: two-sided sign test 2·(1 + 6)/2⁶. And no difference has p
    = 1."""
    first, second = [0] * 6 + [1] * 4, [1] * 5 + [0] + [1] * 4
    second[5], first[5] = 0, 1
    difference, (low, high), p = paired(first, second)
    assert difference == pytest.approx(0.4) and low < 0.4 < high
    assert p == pytest.approx(2 * 7 / 64, abs=0.02)
    assert paired(first, first)[2] == 1.0
    # pairing counts: the same scores in another order are not the same questions
    assert paired([1, 0] * 50, [1, 0] * 50)[2] == 1.0


def go(small, folder, *words):
    evaluation.main(
        [
            "--model", small, "--questions", "10", "--samples", "2", "--batch_size", "6",
            "--max_new_tokens", "20", "--output_dir", str(folder),
            *words,
        ]
    )
    return (folder / "eval-toy.jsonl").read_text().splitlines()


def test_an_interrupted_evaluation_goes_on_where_it_was(small, tmp_path, capsys):
    def score():
        return json.loads((tmp_path / "a/eval-toy.json").read_text()) | {"seconds": None}

    whole, first = go(small, tmp_path / "a"), score()
    assert len(whole) == 1 + 10 + 20
    for cut in (1, 5, 16, 20, 31):  # after so many lines, and in the middle of the next one
        (tmp_path / "a/eval-toy.jsonl").write_text(
            "\n".join(whole[:cut]) + "\n" + "".join(whole[cut : cut + 1])[:30]
        )
        assert sorted(go(small, tmp_path / "a")) == sorted(whole)
        assert score() == first
    capsys.readouterr()
    with pytest.raises(
        UserError,
        match=r"holds answers in another setting \(temperature 1.0\): name another --output_dir",
    ):
        go(small, tmp_path / "a", "--temperature", "0.5")


def test_without_memory_the_option_that_needs_less_is_named(small, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(evaluation, "examine", full)
    with pytest.raises(UserError, match="^out of memory: lower --batch_size 6.$"):
        go(small, tmp_path / "a")


@pytest.mark.slow
def test_the_number_of_ranks_changes_nothing(small, tmp_path):
    alone = go(small, tmp_path / "a")
    done = torchrun(ROOT / "eval.py", "--model", small, "--questions", "10", "--samples", "2", "--batch_size", "6",
                    "--max_new_tokens", "20", "--output_dir", tmp_path / "b", ranks=3)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "b/eval-toy.jsonl").read_text().splitlines() == alone


def test_several_benchmarks_each_with_its_setting(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"question": "1+1=?", "answer": "One and one.\n#### 2"},
        {"problem": "2+2=?", "answer": "4", "level": 1},
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation.main(
        [
            "--model", small, "--benchmark", "mine.jsonl", "toy", "--questions", "3", "--samples",
            "0", "--max_new_tokens", "9", "--output_dir", "out",
        ]
    )
    summary = json.loads((tmp_path / "out/eval-mine.json").read_text())
    assert (summary["questions"], summary["max_new_tokens"], summary["judge"]) == (
        2, 9, "gsm8k_accuracy",
    ) and "sampled" not in summary
    setting, *answers = [
        json.loads(line) for line in (tmp_path / "out/eval-mine.jsonl").read_text().splitlines()
    ]
    assert setting["setting"]["system_prompt"] == SYSTEM_PROMPT
    assert [row["question"] for row in answers] == ["1+1=?", "2+2=?"] and {
        "completion", "correct", "score",
    } <= set(answers[0])
    evaluation.main(
        [
            "--model", small, "--benchmark", "mine.jsonl", "--questions", "1", "--samples", "0",
            "--max_new_tokens", "9", "--system_prompt", "", "--output_dir", "none",
        ]
    )
    assert json.loads((tmp_path / "none/eval-mine.json").read_text())["system_prompt"] == ""
    assert json.loads((tmp_path / "out/eval-toy.json").read_text())["judge"] == "toy_accuracy"
    assert "greedy" in capsys.readouterr().out


def test_completions_of_another_program_are_scored(tmp_path, capsys):
    rows = [
        {
            "question": "1+1", "answer": "#### 2",
            "completions": ["<answer>2</answer>", "<answer>3</answer>", "the answer is 2.0"],
        },
        {
            "question": "2+2", "answer": "4",
            "completions": ["#### 5", "\\boxed{5}", "<answer>4</answer>"],
        },
    ]
    single = [
        {"question": r["question"], "answer": r["answer"], "completion": c}
        for r in rows
        for c in r["completions"]
    ]
    for name, lines in [("many", rows), ("single", random.Random(0).sample(single, 6))]:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        evaluation.main(
            ["--from_file", str(tmp_path / f"{name}.jsonl"), "--output_dir", str(tmp_path)]
        )
        summary = json.loads((tmp_path / f"scored-{name}.json").read_text())["sampled"]
        assert (summary["accuracy"], summary["samples"], summary["questions"]) == (0.5, 3, 2)
        assert summary["pass@2"] == pytest.approx((1 + 2 / 3) / 2)
    for bad in (
        '"completion": 3', '"completions": "3"', '"completions": 3', '"completions": []',
        '"text": "3"',
    ):
        (tmp_path / "bad.jsonl").write_text('{"question": "1", "answer": "1", ' + bad + "}\n")
        with pytest.raises(
            UserError, match="each line needs 'completion', a text, or each line 'completions'"
        ):
            evaluation.main(
                ["--from_file", str(tmp_path / "bad.jsonl"), "--output_dir", str(tmp_path)]
            )


def test_results_go_beside_what_is_evaluated_or_under_runs(small, tmp_path, monkeypatch):
    """Nothing of them is tracked by git."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/some.jsonl").write_text(
        '{"question": "1+1", "answer": "2", "completion": "<answer>2</answer>"}\n'
    )
    evaluation.main(["--from_file", "mine/some.jsonl"])
    # as if it came from the hub
    monkeypatch.setattr(evaluation, "resolve_model", lambda name: small)
    evaluation.main(
        ["--model", "Me/Model-1B", "--questions", "2", "--samples", "0", "--max_new_tokens", "9"]
    )
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json*")}
    assert written == {
        "mine/some.jsonl", "mine/scored-some.json", "runs/eval-Model-1B/eval-toy.json",
        "runs/eval-Model-1B/eval-toy.jsonl",
    }


def test_a_model_in_a_read_only_folder_has_its_results_under_runs(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    may = os.access
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != small and may(path, mode))
    before = sorted(os.listdir(small))
    evaluation.main(
        ["--model", small, "--questions", "1", "--samples", "0", "--max_new_tokens", "3"]
    )
    assert sorted(os.listdir(small)) == before
    assert (tmp_path / f"runs/eval-{Path(small).name}/eval-toy.json").exists()


def test_a_folder_of_results_that_cannot_be_written_is_one_sentence(small, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match=r"^the folder .*file of the results cannot be made \(File exists\): name another "
              r"--output_dir.$",
    ):
        go(small, tmp_path / "file")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/eval-toy.jsonl.new").symlink_to("/dev/full")
    with pytest.raises(
        UserError,
        match="^the disk is full, and nothing can be written: make room, or name another "
              "--output_dir than ",
    ):
        go(small, tmp_path / "a")


@pytest.mark.parametrize("words, message", [
    ("--seed 9223372036854775807", "--seed must be at most 1,000,000,000,000, not "
                                   "9223372036854775807."),
    ("--top_p 0", "--top_p must lie in (0, 1], not 0.0."),
    ("--temperature 0", "--temperature must be above 0, not 0.0: the greedy completion is always "
                        "scored."),
    ("--temperature nan", "--temperature must be above 0, not nan: the greedy completion is always "
                          "scored."),
    ("--num_generations 3", "unknown option --num_generations. `--help` lists all options."),
])  # fmt: skip
def test_a_value_that_cannot_be_is_one_sentence_about_this_option(words, message):
    with pytest.raises(UserError) as error:
        evaluation.main(words.split())
    assert str(error.value) == message


def test_questions_with_different_numbers_of_completions():
    summary = summarize(records_of([[1, 0, 0], [1, 1, 1, 1]]))
    assert (summary["samples"], summary["accuracy"]) == (3, pytest.approx((1 / 3 + 1) / 2))
    # no answers
    assert (
        summary["pass@3"] == 1
        and summary["pass@2"] == pytest.approx((2 / 3 + 1) / 2)
        and "maj@3" not in summary
    )


def test_a_column_named_index_and_strange_line_ends_change_nothing(small, tmp_path, monkeypatch):
    """A pandas export has an index of its own, and U+2028 ends a line for Python, but not in
    JSON."""
    rows = [{"question": f"{i}+1=?\u2028", "answer": f"{i + 1}", "index": 100} for i in range(4)]
    (tmp_path / "mine.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    argv = [
        "--model", small, "--benchmark", str(tmp_path / "mine.jsonl"), "--samples", "2",
        "--max_new_tokens", "5",
    ]
    argv += ["--output_dir", str(tmp_path)]
    evaluation.main(argv)
    _, records = evaluation.read_answers(tmp_path / "eval-mine.jsonl")
    assert [r["index"] for r in records] == [*range(4), *(i for i in range(4) for _ in range(2))]
    monkeypatch.setattr(evaluation, "Sampler", lambda *_: None)  # all is there
    evaluation.main(argv)


def test_another_judge_under_the_same_name_is_another_setting(small, tmp_path):
    for value in ("0.0", "1.00"):
        (tmp_path / "own.py").write_text(
            f"def mine(completions, **columns):\n    return [{value}] * len(completions)\n"
        )
        argv = ["--judge", f"{tmp_path / 'own.py'}:mine"]
        if value == "0.0":
            go(small, tmp_path / "a", *argv)
    with pytest.raises(UserError, match=r"in another setting \(judged_by "):
        go(small, tmp_path / "a", *argv)


def test_another_reward_model_in_the_same_folder_is_another_setting(small, tmp_path):
    judge = make(tmp_path / "judge")
    go(small, tmp_path / "a", "--judge", f"RewardModel:{judge}:0.5")
    go(small, tmp_path / "a", "--judge", f"RewardModel:{judge}:0.5")  # nothing has changed
    file = tmp_path / "judge/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=r"in another setting \(judged_by "):
        go(small, tmp_path / "a", "--judge", f"RewardModel:{judge}:0.5")


def test_two_models_are_compared_on_the_same_questions_only(small, tmp_path, capsys):
    go(small, tmp_path / "a")
    go(small, tmp_path / "b", "--seed", "7")
    capsys.readouterr()
    evaluation.main(
        ["--compare", str(tmp_path / "a/eval-toy.jsonl"), str(tmp_path / "b/eval-toy.jsonl")]
    )
    said = capsys.readouterr().out
    assert (
        "greedy" in said
        and "+0.0000 [-0.2775, +0.2775], p = 1.0000, 10 questions" in said
        and "sampled" in said
    )
    go(small, tmp_path / "d", "--samples", "0")
    evaluation.main(
        ["--compare", str(tmp_path / "a/eval-toy.jsonl"), str(tmp_path / "d/eval-toy.jsonl")]
    )
    said = capsys.readouterr().out
    assert (
        "note: not the same samples: 2 and 0." in said
        and "\ngreedy" in said
        and "\nsampled" not in said
    )
    go(small, tmp_path / "c", "--questions", "9")
    with pytest.raises(UserError, match="the same questions"):
        evaluation.main(
            ["--compare", str(tmp_path / "a/eval-toy.jsonl"), str(tmp_path / "c/eval-toy.jsonl")]
        )


@pytest.mark.parametrize("content", [b"\xff\xc0", b"1" * 5000, b"[" * 100_000, b'{"question": "1"}'])
def test_what_eval_has_not_written_is_not_compared(tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(UserError, match="other is no file of answers that eval.py has written"):
        evaluation.main(["--compare", str(tmp_path / "other"), str(tmp_path / "other")])


def test_a_comparison_notes_what_makes_it_unfair_in_a_fixed_order(tmp_path, capsys):
    keys = ["model", "benchmark", "questions", "data", "judge", "judged_by", "system_prompt", "max_new_tokens", "samples", "temperature",
            "top_p", "top_k", "seed", "batch_size", "weights", "torch", "transformers"]  # fmt: skip
    for side in "ab":
        setting = {key: f"{key} {side}" for key in random.Random(side).sample(keys, len(keys))}
        lines = [
            {"setting": setting},
            {"part": "greedy", "index": 0, "question": "1+1", "correct": True},
        ]
        (tmp_path / side).write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluation.main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")])
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert notes == [
        f"note: not the same {key}: '{key} a' and '{key} b'."
        for key in (
            "data", "judge", "judged_by", "system_prompt", "max_new_tokens", "samples",
            "temperature", "top_p", "top_k",
        )
    ]


def test_no_completion_waits_for_the_device_by_itself(loaded):
    """`int(tensor)` and `bool(tensor)` are one wait each: they must not grow with the
    completions."""

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **kwargs or {})

    model, tokenizer = loaded
    counts = []
    for samples in (1, 5):
        questions, _ = load_questions("toy", tokenizer, split="test", limit=2)
        drawn = Sampler(model, tokenizer).sample(
            [row["prompt"] for row in questions], samples, Sampling(8), 0
        )
        sampler = SimpleNamespace(sample=lambda *_, drawn=drawn: drawn)
        with Waits() as waits:
            waits.count = 0
            records = evaluation.evaluate(
                sampler, tokenizer, questions, always("1"), Sampling(8), samples=samples
            )
        counts.append(waits.count)
        assert [(r["tokens"], r["truncated"]) for r in records] == list(
            zip(drawn.lengths.tolist(), drawn.truncated.tolist())
        )
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--benchmark", "gsm9k"], "unknown data set 'gsm9k': there are toy, toy_code, arithmetic, "
                                   "gsm8k, "),
        (["--benchmark", "toy", "toy"], "names two of the same name"),
        (["--samples", "-1"], "--samples must be at least 0"),
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--model", "./nowhere"], "does not exist"),
        (["--dataset", "toy"], "unknown option --dataset"),
        (["--judge", "nobody"], "unknown reward 'nobody'"),
        (["--judge", str(OWN)], f"^--judge: name a function of the file, as {OWN}:FUNCTION. It has "
                                "brevity\\.$"),
        (["--compare", "a.jsonl"], "--compare takes two files"),
        (["--compare", "a.jsonl", "b.jsonl", "--samples", "2"], "--samples has no effect with "
                                                                "--compare."),
        (["--from_file", "a.jsonl", "--model", "toy2"], "--model has no effect with --from_file."),
        (["--samples", "0", "--top_p", "0.9"], "--top_p has no effect with --samples 0: nothing is "
                                               "sampled."),
        (["--compare", "a.jsonl", "b.jsonl"], "is no file of answers"),
        (["--compare", ".", "."], "is no file of answers"),
        (["--benchmark", "toy", "toy_code"], "toy_code has a base model of its own"),
    ],
)
def test_bad_input_of_eval(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        evaluation.main(argv)


def test_the_verdicts_are_those_of_a_person_who_reads_the_completions():
    """Completions, judged by hand. Two readings are more lenient than the reward, which takes no
    sentence for a number."""
    rows = [
        json.loads(line)
        for line in (ROOT / "tests/concepts/verdicts.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    assert len(rows) == 74 and 25 < sum(row["right"] for row in rows) < 50
    judged = [
        REWARDS[row["reward"]]([row["completion"]], answer=[row["answer"]])[0] > 0 for row in rows
    ]
    differ = [row["completion"] for row, right in zip(rows, judged) if right != row["right"]]
    assert differ == ["<answer>The profit is $125.</answer>", "<answer>about 125</answer>"]
