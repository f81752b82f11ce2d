"""engine/data/rows.py: data files as people have them, and their mistakes."""

import gzip
import json
import os
import re

import datasets
import pytest

from engine.base import files
from engine.base.errors import UserError
from engine.data.rows import chat_of, check_dataset, open_file, read_rows
from tasks.table import TASKS

ONE = {"question": "1+1=?", "answer": "2"}
ROW = '{"question": "a", "answer": "1"}\n'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write rows (or a text, or bytes) into a file of this name, and return its path."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("engine.data.rows.ask_hub", lambda *_: pytest.fail("the hub was asked"))

    def write(content, name="questions.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, list):
            content = files.as_lines(content)
        if isinstance(content, str):
            content = content.encode()
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        return str(path)

    return write


# --- forms of files ---


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json", "x.parquet"])
def test_every_format_gives_the_same_rows(write, name):
    rows = [ONE, {"question": "é", "answer": "007"}]
    path = write(json.dumps(rows) if name == "x.json" else rows, name)
    if name == "x.parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    assert list(open_file(path)) == rows


def test_a_csv_file_keeps_texts_as_they_are(write):
    path = write('question,answer,level\n"a, b",NA,1\nc,None,2\n', "x.csv.gz")
    found = [(row["question"], row["answer"], row["level"]) for row in open_file(path)]
    assert found == [("a, b", "NA", 1), ("c", "None", 2)]


def test_a_folder_is_a_data_set(write, tmp_path):
    folder = str(tmp_path / "mine")
    write([ONE | {"answer": "train"}], "mine/train-0.jsonl")
    with pytest.raises(UserError, match="Unknown split.*: name a file of the questions"):
        read_rows(folder, "test")
    write([ONE | {"answer": "test"}], "mine/test-0.jsonl")
    train, test = (read_rows(folder, split) for split in ("train", "test"))
    assert [train[0]["answer"], test[0]["answer"]] == ["train", "test"]
    assert train.fingerprint != test.fingerprint
    wrong = write("{", "mine/train-1.jsonl")
    with pytest.raises(UserError, match=f"^{wrong} cannot be loaded"):
        read_rows(folder)


@pytest.mark.parametrize("folder, answer", [("both", "test"), ("both/train", "train")])
def test_a_folder_of_save_to_disk_is_read(tmp_path, folder, answer):
    """One data set is one file's; of several each is a split."""
    content = {split: datasets.Dataset.from_list([ONE | {"answer": split}])
               for split in ("train", "test")}
    datasets.DatasetDict(content).save_to_disk(tmp_path / "both")
    [row] = read_rows(str(tmp_path / folder), "test")
    assert row["answer"] == answer


@pytest.mark.parametrize("value, text", [
    (27.0, "27"), (-0.00005, "-0.00005"), (0.1 + 0.2, "0.3"),
    (2.0**53 - 1, "9007199254740991"), (["2"], "2"), ([0.5], "0.5"),
])  # fmt: skip
def test_a_number_becomes_the_text_that_people_write(write, value, text):
    [row] = read_rows(write([ONE | {"answer": value}]))
    assert row["answer"] == text


def test_a_label_is_its_name(write):
    label = datasets.ClassLabel(names=["A", "B"])
    features = datasets.Features(question=datasets.Value("string"), answer=label)
    path = write([ONE], "x.parquet")
    datasets.Dataset.from_list([ONE | {"answer": 1}], features=features).to_parquet(path)
    assert read_rows(path)[0]["answer"] == "B"


@pytest.mark.parametrize("end", [".jsonl", "/train.jsonl"])
def test_the_same_content_in_another_file_or_folder_is_the_same_data_set(write, end):
    """A resumed run asks for it, perhaps in another place and on another day."""
    found = []
    for name, text in {"a": ROW, "b": ROW, "c": ROW * 2}.items():
        path = write(text, name + end)
        os.utime(path, (0, len(found)))
        rows = open_file(path.removesuffix("/train.jsonl"))
        found.append(rows.select([0]).fingerprint)
    assert found[0] == found[1] != found[2]


def test_lines_may_be_blank_and_begin_with_a_byte_order_mark(write):
    path = write('\ufeff{"question": "é", "answer": "2"}\r\n\n  \n' + ROW)
    assert [row["question"] for row in open_file(path)] == ["é", "a"]


# --- columns ---


def chat(question, *first):
    turns = [("user", "Before."), ("assistant", "Yes."), ("user", question)]
    return [{"role": role, "content": content} for role, content in (*first, *turns)]


SHAPES = [  # as data sets are published: (a row, the columns of its question Q and its answer 3)
    ({"prompt": chat("Q"), "reward_model": {"ground_truth": "3", "style": "rule"},
      "extra_info": {"answer": "long #### 3", "question": "q"}},  # verl's gsm8k
     "prompt", "reward_model.ground_truth"),
    ({"prompt": chat("Q", ("system", "Be kind.")), "solution": "3"}, "prompt", "solution"),  # TRL
    ({"problem": "Q", "solution": "long", "answer": "3"}, "problem", "answer"),  # OpenR1-Math
    ({"messages": chat("Q"), "ground_truth": 3.0}, "messages", "ground_truth"),
    ({"question": "Q", "extra_info": {"answer": "3"}}, "question", "extra_info.answer"),
    ({"instruction": "Q", "answer": "3"}, "instruction", "answer"),
    ({"instruction": "Q", "input": "1, 2", "answer": "3"}, "instruction", "answer"),  # Alpaca
]


@pytest.mark.parametrize("row, question, answer", SHAPES)
def test_the_columns_of_published_data_sets_are_found(write, row, question, answer):
    rows = open_file(write([row]))
    assert rows.columns == (question, answer)
    [found] = rows
    asked = "Q\n\n1, 2" if "input" in row else "Q"
    assert (found["question"], found["answer"]) == (asked, "3")
    # it will hold the tokens; until then it is the whole chat
    assert found.get("prompt") == (row[question] if isinstance(row[question], list) else None)


ODD = {"Frage": "Q", "meta": {"final": {"number": 3.0}, "level": 3}}


@pytest.mark.parametrize("row, words", [
    (ODD, "question=Frage,answer=meta.final.number"),
    ({"question": "Q", "answer": "2", "a": "3"}, "answer=a"),  # the other one is looked for
    ({"chat": chat("Q"), "answer": "3"}, "question=chat"),
    ({"meta.q": "Q", "meta.a": "3"}, "question=meta.q,answer=meta.a"),
])  # fmt: skip
def test_columns_may_be_named(write, row, words):
    [found] = open_file(write([row]), columns=words.split(","))
    assert found == found | row | {"question": "Q", "answer": "3"}  # all other columns are kept


def test_a_missing_column_is_told_with_words_to_paste(write):
    path = write([{"my q": "a", "meta": {"x": "1"}}])
    said = f"^{path} has no column for the answer: .* --columns 'question=my q' answer=NAME$"
    with pytest.raises(UserError, match=said):
        open_file(path, columns=["question=my q"])


@pytest.mark.parametrize("words, reason", [
    ("question=Qestion", "it has question, answer. .*: --columns question=question answer=answer$"),
    ("a=b", "'a=b' must be"), ("answer=a answer=b", "'answer=b' must be .* at most once"),
])
def test_a_mistake_in_the_names_of_columns_is_one_sentence(write, words, reason):
    with pytest.raises(UserError, match=reason):
        read_rows(write([ONE]), columns=words.split())


def test_a_turn_may_hold_its_text_in_parts():
    parts = [{"type": "text", "text": "Q, "}, {"type": "text", "text": "R"}]
    for content, text in ((parts, "Q, R"), (None, "")):
        messages = [*chat("A"), {"role": "user", "content": content, "name": None}]
        assert chat_of(messages) == [*chat("A"), {"role": "user", "content": text}]


@pytest.mark.parametrize("turn", [
    {"role": "user", "content": [{"type": "image", "image": "x.png"}]}, "Q",
])
def test_what_is_no_text_is_refused(turn):
    with pytest.raises(ValueError, match="is no turn of a chat: it needs a role, and a text"):
        chat_of([*chat("A"), turn])


PARTS = "choices option_a A context images tools story chat_history input messages"


@pytest.mark.parametrize("row, parts", [
    (ONE | dict.fromkeys("level subject type source id url solution difficulty".split(), "x"), ""),
    (ONE | dict.fromkeys(PARTS.split(), "x"), PARTS),
])
def test_columns_that_look_like_a_part_of_the_question_are_known(write, row, parts):
    assert open_file(write([row])).unread() == parts.split()


# --- mistakes ---


def refused(path, reason):
    with pytest.raises(UserError, match=reason) as error:
        read_rows(path)
    assert "questions.jsonl" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content, reason", [
    ("", "empty"), (b'\n{"question": "caf\xe9", "answer": "1"}', "row 1.*utf-8"),
    (ROW + '\n{"question": "b",', "line 3"), (ROW + '{"text": "a"}', "row 2.*missing"),
])
def test_a_broken_file_is_named_with_the_line(write, content, reason):
    refused(write(content), reason)


@pytest.mark.parametrize("old, new, reason", [
    ('"1"', '" \\n"', "row 1.*empty"), ('"1"', '{"a": 1}', "it has question, answer.a[.]"),
    ('"1"', '["1", "2"]', "row 1.*neither a text nor a number"),
    ('"1"', "NaN", "row 1.*no exact number"), ('"a"', '["a"]', "row 1.*no turn of a chat"),
    ('"a"', '[{"role": "system", "content": "a"}]', "row 1.*empty"),
])
def test_a_value_that_is_no_question_or_answer_is_named_with_its_row(write, old, new, reason):
    refused(write(ROW.replace(old, new)), reason)


def test_a_row_that_comes_late_is_left_out(write, monkeypatch):
    monkeypatch.setattr("engine.data.rows.LOOKED_AT", 1)
    rows = read_rows(write([ONE, ONE | {"answer": ""}]))
    assert len(rows) == 2
    with pytest.raises(ValueError, match="missing or empty"):
        rows[1]


def test_a_name_that_is_no_data_set_is_refused(write):
    for name in ("missing.jsonl", "a/b/c", "gsm9k", write("a", "x.txt")):
        with pytest.raises(UserError, match=f"'{re.escape(name)}': .*here are toy, .*ends with"):
            check_dataset(name)
    for name in (*TASKS, write([ONE]), "owner/name"):
        check_dataset(name)
