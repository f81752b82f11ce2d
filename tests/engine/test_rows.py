"""engine/data/rows.py: data files as people have them, and their mistakes."""

import gzip
import json
import re
import shlex

import datasets
import pytest

from engine.base.errors import UserError
from engine.data.rows import check_dataset, open_file, read_rows
from tasks.table import TASKS

ONE = {"question": "1+1=?", "answer": "2"}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write rows (or a text, or bytes) into a file of this name, and return its path."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def write(content, name="questions.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith("parquet"):
            datasets.Dataset.from_list(content).to_parquet(path)
            return str(path)
        if isinstance(content, list):
            lines = [json.dumps(row) for row in content]
            whole_array = ".jsonl" not in name
            content = json.dumps(content) if whole_array else "\n".join(lines)
        content = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        return str(path)

    return write


# --- forms of files ---


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x.jsonl.gz", "x.json.gz"])
def test_every_format_gives_the_same_rows(write, name):
    rows = [ONE, {"question": "é", "answer": "007"}]
    assert list(open_file(write(rows, name))) == rows


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
def test_a_csv_file_keeps_texts_as_they_are(write, name):
    path = write('question,answer,level\n"a, b",NA,1\nc,None,2\n', name)
    assert list(open_file(path)) == [
        {"question": "a, b", "answer": "NA", "level": 1},
        {"question": "c", "answer": "None", "level": 2}]


def test_a_folder_is_a_data_set(write, tmp_path):
    write([ONE], "mine/train-0.parquet")
    write([ONE | {"answer": "3"}], "mine/test-0.parquet")
    name = str(tmp_path / "mine")
    assert [read_rows(name, split)[0]["answer"] for split in ("train", "test")] == ["2", "3"]


def test_lines_may_be_blank_and_begin_with_a_byte_order_mark(write):
    path = write('\ufeff{"question": "é", "answer": "2"}\r\n\n  \n{"question": "a", "answer": "1"}')
    assert [row["question"] for row in open_file(path)] == ["é", "a"]


# --- columns ---


def chat(question, system=None):
    turns = [{"role": "user", "content": "Before."}, {"role": "assistant", "content": "Yes."},
             {"role": "user", "content": question}]
    return [{"role": "system", "content": system}, *turns] if system else turns


SYSTEM = "Be kind."
SHAPES = {  # as these data sets are published: (a row, its question, its answer, their columns)
    "DAPO-Math-17k": ({"data_source": "math_dapo", "prompt": chat("Q"),
                       "reward_model": {"ground_truth": "34", "style": "rule"}}, "Q", "34",
                      ("prompt", "reward_model.ground_truth")),
    "verl's gsm8k": ({"data_source": "openai/gsm8k", "prompt": chat("Q"),
                      "reward_model": {"style": "rule", "ground_truth": "72"},
                      "extra_info": {"answer": "long #### 72", "question": "q"}}, "Q", "72",
                     ("prompt", "reward_model.ground_truth")),
    "TRL": ({"prompt": chat("Q", SYSTEM), "solution": "1/2"}, "Q", "1/2", ("prompt", "solution")),
    "OpenR1-Math": (
        {"problem": "Q", "solution": "long", "answer": "3"}, "Q", "3", ("problem", "answer")),
    "messages": (
        {"messages": chat("Q"), "ground_truth": 7.0}, "Q", "7", ("messages", "ground_truth")),
    "extra_info": ({"question": "Q", "extra_info": {"answer": "3"}}, "Q", "3",
                   ("question", "extra_info.answer")),
    "alpaca": ({"instruction": "Q", "input": "1, 2", "answer": "3"}, "Q\n\n1, 2", "3",
               ("instruction", "answer")),
    "alpaca, empty": (
        {"instruction": "Q", "input": "", "answer": "3"}, "Q", "3", ("instruction", "answer")),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_columns_of_published_data_sets_are_found(write, shape):
    row, question, answer, columns = SHAPES[shape]
    rows = open_file(write([row], "x.parquet"))
    assert rows.columns == columns
    assert (rows[0]["question"], rows[0]["answer"]) == (question, answer)
    assert "prompt" not in rows[0]  # it will hold the tokens
    assert rows[0].get("system_prompt") == (SYSTEM if shape == "TRL" else None)


ODD = {"Frage": "1+1=?", "meta": {"final": {"number": 2.0}, "level": 3}, "a b": "4"}


@pytest.mark.parametrize("row, words, expected", [
    (ODD, "question=Frage,answer=meta.final.number", ("1+1=?", "2")),
    (ODD, "answer=a b,question=Frage", ("1+1=?", "4")),
    (ONE | {"a": "3"}, "answer=a", ("1+1=?", "3")),  # the other one is looked for
    (ONE | {"chat": chat("Q")}, "question=chat", ("Q", "2")),
    ({"meta.q": "Q", "meta.a": "3"}, "question=meta.q,answer=meta.a", ("Q", "3")),
])
def test_columns_may_be_named(write, row, words, expected):
    for name in ("x.jsonl", "y.parquet"):
        [found] = open_file(write([row], name), columns=words.split(","))
        assert (found["question"], found["answer"]) == expected
        others = row.keys() - {"question", "answer"}
        assert {name: found[name] for name in others} == {name: row[name] for name in others}


@pytest.mark.parametrize("row, what, named", [
    ({"q": "a", "a": "1", "level": 3}, "the answer", "question=q answer=a"),
    ({"problem": "a", "label": "1", "level": 3}, "the answer", "question=problem answer=label"),
    ({"chat": chat("a"), "answer": "1"}, "the question", "question=chat answer=answer"),
    ({"question": "a", "my label": "1"}, "the answer", "question=question 'answer=my label'"),
    ({"question": "a", "x": "1", "y": "2"}, "the answer", "question=question answer=NAME"),
    ({"question": "a", "meta": {"x": "1"}}, "the answer", "question=question answer=meta.x"),
    ({"text": "a", "n": 1}, "the question and the answer", "question=NAME answer=NAME"),
])  # fmt: skip
def test_a_missing_column_is_told_with_words_to_paste(write, row, what, named):
    with pytest.raises(UserError) as error:
        open_file(path := write([row]), columns=["question=q"] if "q" in row else None)
    there = ", ".join(row).replace("meta", "meta.x")
    assert str(error.value) == (
        f"{path} has no column for {what}: it has {there}. Name it: --columns {named}")
    if "NAME" not in named:  # it can be pasted
        assert list(open_file(path, columns=shlex.split(named)))


@pytest.mark.parametrize("words, reason", [
    (["question=q"], "no column 'q', which --columns names .* it has question, answer[.]"),
    (["answer=question.x"], "no column 'question.x'"), (["question"], "'question' must be"),
    (["a=b"], "'a=b' must be"), (["answer="], "'answer=' must be"), (["=a"], "'=a' must be"),
    (["answer=a", "answer=b"], "'answer=b' must be .* at most once"),
])  # fmt: skip
def test_a_mistake_in_the_names_of_columns_is_one_sentence(write, words, reason):
    with pytest.raises(UserError, match=reason):
        read_rows(write([ONE]), columns=words)


# --- mistakes ---


@pytest.mark.parametrize("content, reason", [
    ("", "empty"), ("\n  \n", "no data"),
    (b'\n{"question": "caf\xe9", "answer": "1"}', "row 1.*utf-8"),
    ('{"question": "a", "answer": "1"}\n\n{"question": "b",', "line 3"),
    ("question,answer\na,1", "line 1"), ('["a", "1"]', "no column"), ("17", "row 0"),
    ('{"question": "a", "answer": "1"}\n{"text": "a", "answer": "1"}', "row 2.*missing"),
    ('{"question": "a", "answer": "1"}\n{"question": "a", "answer": " \\n"}', "row 2.*empty"),
    ('{"question": "\\t", "answer": "1"}', "row 1.*empty"),
    ('{"question": null, "answer": "1"}', "row 1.*empty"),
    ('{"question": "a", "answer": {"a": 1}}', "it has question, answer.a[.]"),
    *(('{"question": "a", "answer": ' + answer + "}", "row 1.*no exact number")
      for answer in ("1" * 5000, "12345678901234567890123", "NaN")),
    ('{"question": "a \\ud800", "answer": "1"}', "surrogate"),
    ('{"question": "a", "answer": "1"}\n' + "[" * 10**5 + "]" * 10**5, "line 2.*RecursionError"),
    ('{"question": "a", "answer": ["1"]}', "row 1.*neither a text nor a number"),
    *(('{"question": ' + question + ', "answer": "1"}', "row 1.*no chat")
      for question in ('["a"]', '[{"from": "human", "value": "a"}]')),
    ('{"question": [{"role": "system", "content": "a"}], "answer": "1"}', "row 1.*empty"),
], ids=range(21))
def test_a_broken_file_is_named_with_the_line(write, content, reason):
    with pytest.raises(UserError, match=reason) as error:
        read_rows(write(content))
    assert "questions.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_row_that_comes_late_is_left_out(write, monkeypatch):
    monkeypatch.setattr("engine.data.rows.LOOKED_AT", 1)
    rows = read_rows(write([ONE, ONE | {"answer": ""}]))
    assert len(rows) == 2
    with pytest.raises(ValueError, match="missing or empty"):
        rows[1]


def test_a_name_that_is_no_data_set_is_refused(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a", "mine/x.txt")
    no_format = ["mine/x.txt", write("a", "x.txt"), write([ONE], "x.jsonl.bak")]
    for name in ("missing.jsonl", "a/b/c", "a/missing.csv.gz", "./x", "gsm9k", *no_format):
        with pytest.raises(UserError, match=f"'{re.escape(name)}': .*here are toy, .*ends with"):
            check_dataset(name)
    for name in (*TASKS, write([ONE]), "owner/name"):
        check_dataset(name)
