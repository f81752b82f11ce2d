"""engine/data/rows.py: data files as people have them, and their mistakes."""

import gzip
import json
import re

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


SHAPES = {  # as these data sets are published: (a row, its question and its answer)
    "DAPO-Math-17k": ({"data_source": "math_dapo", "prompt": chat("Q"),
                       "reward_model": {"ground_truth": "34", "style": "rule"}}, "34"),
    "verl's gsm8k": ({"data_source": "openai/gsm8k", "prompt": chat("Q"),
                      "reward_model": {"style": "rule", "ground_truth": "72"},
                      "extra_info": {"answer": "long #### 72", "question": "q"}}, "72"),
    "TRL": ({"prompt": chat("Q"), "solution": "1/2"}, "1/2"),
    "OpenR1-Math": ({"problem": "Q", "solution": "long", "answer": "3"}, "3"),
    "MetaMathQA": ({"query": "Q", "original_question": "O", "response": "It is 10"}, "It is 10"),
    "Big-Math": ({"prompt": "Q", "solution": "4", "llama8b_solve_rate": 0.5}, "4"),
    "alpaca": ({"instruction": "Q", "input": "", "output": "3"}, "3"),
    "ORZ": ({"0": {"from": "human", "value": "Q"},
             "1": {"from": "assistant", "ground_truth": {"value": "5"}}}, "5"),
    "messages": ({"messages": chat("Q"), "ground_truth": 7.0}, "7"),
    "one in a list": ({"Question": "Q", "answer": ["27"]}, "27"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_columns_of_published_data_sets_are_found(write, shape):
    row, answer = SHAPES[shape]
    rows = open_file(write([row], "x.parquet"))
    assert (rows[0]["question"], rows[0]["answer"]) == ("Q", answer)
    question, column = rows.columns
    if (question, column) != ("question", "answer"):
        [note] = rows.notes()
        assert f"'{question}'" in note and f"'{column}'" in note
    assert "prompt" not in rows[0]  # it will hold the tokens


def test_the_system_turn_of_a_chat_is_kept_and_alpacas_input_belongs_to_the_question(write):
    row = open_file(write([{"prompt": chat("Q", "Be kind."), "answer": "1"}], "x.json"))[0]
    assert row["system_prompt"] == "Be kind."
    row = open_file(write([{"instruction": "Add", "input": "1, 2", "output": "3"}], "y.json"))[0]
    assert row["question"] == "Add\n\n1, 2"


@pytest.mark.parametrize("row, what", [
    ({"text": "a", "answer": "1"}, "question"), ({"question": "a", "label": "1"}, "answer"),
])  # fmt: skip
def test_a_missing_column_is_named_with_those_that_are_there(write, row, what):
    with pytest.raises(UserError, match=f"no column for the {what}: it has {', '.join(row)}"):
        open_file(write([row]))


def test_copies_are_counted(write):
    [note] = open_file(write([ONE, ONE, ONE | {"question": "2"}])).notes()
    assert "only 2 of 3 questions are different" in note
    rows = [{"instruction": "Add", "input": x, "output": "3"} for x in ("1, 2", "0, 3", "0, 3")]
    assert "only 2 of 3 questions are different" in open_file(write(rows, "y.json")).notes()[1]


# --- mistakes ---


@pytest.mark.parametrize("content, reason", [
    ("", "empty"), ("\n  \n", "empty"), (b'\n{"question": "caf\xe9", "answer": "1"}', "line 2"),
    ('{"question": "a", "answer": "1"}\n\n{"question": "b",', "line 3"),
    ("question,answer\na,1", "line 1"), ('["a", "1"]', "no column"), ("17", "line 1"),
    ('{"question": "a", "answer": "1"}\n{"text": "a", "answer": "1"}', "row 2.*missing"),
    ('{"question": "a", "answer": "1"}\n{"question": "a", "answer": " \\n"}', "row 2.*empty"),
    ('{"question": "\\t", "answer": "1"}', "row 1.*empty"),
    ('{"question": null, "answer": "1"}', "no column for the question"),
    ('{"question": "a", "answer": ' + "1" * 5000 + "}", "neither a text nor a number"),
    ('{"question": "a", "answer": 12345678901234567890123}', "row 1.*lost digits"),
    ('{"question": "a \\ud800", "answer": "1"}', "surrogate"),
    ('{"question": "a", "answer": "1"}\n' + "[" * 10**5 + "]" * 10**5, "line 2.*RecursionError"),
    *(('{"question": "a", "answer": ' + answer + "}", "row 1.*neither a text nor a number")
      for answer in ("[1, 2]", '{"a": 1}', "NaN")),
    ('{"question": ["a"], "answer": "1"}', "row 1.*no message of a chat"),
], ids=range(19))
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


def test_a_name_that_is_no_data_set_is_refused(write):
    for name in ("missing.jsonl", "a/b/c", "runs/missing", "./x", "gsm9k"):
        with pytest.raises(UserError, match=f"'{re.escape(name)}': .*here are toy, "):
            check_dataset(name)
    with pytest.raises(UserError, match="must end with .jsonl, "):
        check_dataset(write("a", "x.txt"))
    for name in (*TASKS, write([ONE]), "owner/name"):
        check_dataset(name)
