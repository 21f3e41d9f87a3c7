"""Rows of files: values as they stand in the file, and one clear line for everything else."""

from __future__ import annotations

import json

import pytest

from trainers.data.sources import load_rows


def write(path, *lines: object) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def test_jsonl_values_are_not_reinterpreted(tmp_path):
    rows = [{"prompt": "when?", "answer": "2020-01-01"}, {"prompt": [{"role": "user", "content": "é"}], "answer": "007"}]
    assert list(load_rows(write(tmp_path / "a.jsonl", *rows))) == rows


def test_blank_lines_are_skipped_and_the_limit_counts_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, "", {"prompt": "b"}, {"prompt": "c"})
    assert [r["prompt"] for r in load_rows(path, limit=2)] == ["a", "b"]


def test_a_byte_order_mark_and_windows_line_ends_are_no_content(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert list(load_rows(str(tmp_path / "a.jsonl"))) == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path):
    row = {"prompt": "a\u2028b\x85c\U0001f600"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert list(load_rows(str(tmp_path / "a.jsonl"))) == [row]
    assert list(load_rows(write(tmp_path / "b.jsonl", row))) == [row]


def test_parquet_goes_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.Dataset.from_list([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]).to_parquet(
        tmp_path / "a.parquet"
    )
    rows = load_rows(str(tmp_path / "a.parquet"), limit=1)
    assert [dict(r) for r in rows] == [{"prompt": "a", "answer": "1"}]


def test_a_hub_name_goes_through_datasets_with_its_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        if split == "tset":
            raise ValueError("Unknown split\n'tset'")
        return datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [dict(r) for r in load_rows("owner/name", split="test", limit=1)] == [{"prompt": "a"}]
    assert asked == [("owner/name", "test")]
    with pytest.raises(ValueError, match=r"cannot load owner/name \(split tset\): Unknown split 'tset'"):
        load_rows("owner/name", split="tset")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("missing.jsonl", None, "cannot read .*missing.jsonl: No such file"),
        ("missing.parquet", None, "missing.parquet does not exist"),
        ("sub/dir/name", None, "does not exist; give a .jsonl or .parquet file, or a hub name"),
        ("a.jsonl", '{"prompt": 1}\n{"prompt"', "line 2 is not JSON"),
        ("a.jsonl", '{"prompt": 1}\n[1]', "line 2 is a list; allowed: one JSON object a line"),
        ("a.jsonl", "\n\n", "has no rows"),
        ("a.jsonl", '{"prompt": "\\ud800"}', "line 1 is not JSON: .*surrogates not allowed"),
        ("a.jsonl", '{"answer": ' + "9" * 5000 + "}", "line 1 is not JSON: Exceeds the limit"),
        ("a.jsonl", "[" * 100_000, "line 1 is not JSON: maximum recursion depth"),
        ("a.parquet", "no parquet", "cannot load .*a.parquet"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path, name, content, expected):
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=expected) as error:
        load_rows(str(path))
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="not UTF-8"):
        load_rows(str(tmp_path / "a.jsonl"))
