"""The Chinese pages: each has its English page, and docs/stale.py lists where it is behind. A
change of an English page fails nothing here. That the links lead somewhere is in test_docs.py, and
that the commands work in test_typed.py."""

from docs import stale

ENGLISH = "# Ask\n\nCPPO keeps\n4 of 16.\n\n## Learn\n\nIt learns.\n\n```\n# a comment\n```\n"
ENGLISH += "\n## More\n\nIt is not translated.\n"
CHINESE = "# 提问\n\nCPPO 保留 16 个中的 4 个。\n\n## 学习\n\n它会学习。\n"


def test_a_chinese_page_has_its_english_page_and_can_be_compared():
    assert len(stale.PAGES) > 5
    for page in stale.PAGES:
        assert stale.english_page(page).is_file()
        stale.stale(page)


def test_a_changed_section_is_listed_until_it_is_translated(tmp_path, monkeypatch, capsys):
    english, chinese = tmp_path / "page.md", tmp_path / "zh/page.md"
    chinese.parent.mkdir()
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    monkeypatch.setattr(stale, "PAGES", [chinese])

    def listed(text, *words):
        english.write_text(text)
        stale.main(words)
        return capsys.readouterr().out

    chinese.write_text(f"{CHINESE}\n{stale.REST}\n\n[更多](../page.md#more)\n")
    translate = "--translated", "zh/page.md"
    assert listed(ENGLISH) == "zh/page.md\n  # Ask\n  ## Learn\n"
    assert listed(ENGLISH, *translate) == listed(ENGLISH.replace("keeps\n4", "keeps 4")) == ""
    changed = ENGLISH.replace("It learns", "The model learns").replace("is not", "may be")
    assert listed(changed) == "zh/page.md\n  ## Learn\n"
    assert listed(changed, *translate) == listed(changed) == ""
    assert chinese.read_text().count("English sections") == 1
