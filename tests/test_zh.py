"""The Chinese pages: each has its English page, and docs/stale.py lists where it is behind. A
change of an English page fails nothing here. That the links lead somewhere is in test_docs.py, and
that the commands work in test_typed.py."""

import pytest

from docs import stale

ENGLISH = """# Ask

[简体中文](zh/page.md)

CPPO keeps 4 of [16](#learn) completions.

## Learn

It learns from `kept`.

```
python train.py --mu 2  # two updates
```
"""
CHINESE = """# 提问

[English](../page.md) · 简体中文

CPPO 保留 [16](#学习) 个补全中的 4 个。

## 学习

它从 `kept` 学习。

```
python train.py --mu 2  # 两次更新
```
"""


@pytest.mark.parametrize("page", stale.PAGES, ids=lambda page: page.name)
def test_a_chinese_page_has_its_english_page_and_can_be_compared(page):
    assert stale.english_page(page).is_file()
    stale.stale(page)


@pytest.fixture
def pair(tmp_path):
    """(the English page, its Chinese page), freshly translated."""
    english, chinese = tmp_path / "page.md", tmp_path / "zh/page.md"
    chinese.parent.mkdir()
    english.write_text(ENGLISH, encoding="utf-8")
    chinese.write_text(CHINESE, encoding="utf-8")
    stale.write_down(chinese)
    return english, chinese


def change(page, old, new):
    text = page.read_text(encoding="utf-8")
    assert text.count(old) == 1
    page.write_text(text.replace(old, new), encoding="utf-8")


WORDS = "another English text than was translated"
CHANGES = [  # in English; what is listed
    ("It learns", "It  learns", {}),
    ("It learns", "The model learns", {"## Learn": [WORDS]}),
    ("## Learn", "## Train", {
        "## Train": [WORDS], "# Ask": ["links: page.md#learn in English, page.md#2 in Chinese"]}),
    ("keeps 4", "keeps 8", {"# Ask": [WORDS, "numbers: 8 in English, 4 in Chinese"]}),
    ("`kept`", "`rows`", {"## Learn": [WORDS, "inline code: rows in English, kept in Chinese"]}),
    ("--mu 2", "--mu 3", {"## Learn": [WORDS, "not the same statements"]}),
    ("It learns", "- It learns", {"## Learn": [WORDS, "not the same shape"]}),
    ("## Learn", "### Learn", {"the headings": ["others in English than in Chinese"]}),
]


@pytest.mark.parametrize("old, new, listed", CHANGES)
def test_a_changed_section_is_listed_until_it_is_translated(pair, monkeypatch, old, new, listed):
    monkeypatch.setattr(stale, "ROOT", pair[0].parent)
    assert stale.stale(pair[1]) == {}
    change(pair[0], old, new)
    assert stale.stale(pair[1]) == listed


def test_a_section_that_is_not_translated_is_linked_at_the_end(pair):
    english, chinese = pair
    english.write_text(f"{ENGLISH}\n## More\n\nText.\n", encoding="utf-8")
    assert [*stale.stale(chinese)] == ["## More", "the headings"]
    rest = f"{CHINESE}\n{stale.REST}\n\n[更多](../page.md#more)\n"
    chinese.write_text(rest, encoding="utf-8")
    stale.write_down(chinese)
    assert stale.stale(chinese) == {}
    change(english, "Text.", "Another text.")
    assert stale.stale(chinese) == {}
    change(english, "## More", "## Something else")
    assert stale.stale(chinese) == {"the headings": ["others in English than in Chinese"]}


def test_what_is_translated_is_written_down(pair, monkeypatch, capsys):
    english, chinese = pair
    monkeypatch.setattr(stale, "ROOT", english.parent)
    monkeypatch.setattr(stale, "PAGES", [chinese])
    change(english, "It learns", "The model learns")
    stale.main([])
    assert capsys.readouterr().out == f"zh/page.md\n  ## Learn\n    {WORDS}\n"
    change(chinese, "它从", "模型从")
    stale.main(["--translated", "zh/page.md"])
    stale.main([])
    assert capsys.readouterr().out == ""
    assert chinese.read_text(encoding="utf-8").count("English sections") == 1
    change(chinese, "4 个", "8 个")  # a wrong translation
    stale.main([])
    assert "numbers: 4 in English, 8 in Chinese" in capsys.readouterr().out
