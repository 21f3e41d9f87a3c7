"""Stop strings in text that grows token by token."""

from __future__ import annotations

import itertools
import random

from inference_v2.stopping import StopText


class Pieces:
    """Each id is a piece of UTF-8 bytes; id 0 is special."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = (b"", *pieces)
        self.decoded = 0

    def decode(self, token_ids, skip_special_tokens=False):
        self.decoded += len(token_ids)
        return b"".join(self.pieces[i] for i in token_ids).decode(errors="replace")


def push_all(tokenizer, stop, ids):
    text = StopText(tokenizer, stop)
    return [text.push(ids[: n + 1]) for n in range(len(ids))]


def test_a_stop_string_across_tokens_ends_the_text_before_it():
    assert push_all(Pieces(b"hello ", b"wo", b"rld", b"!"), ("world",), [1, 2, 3, 4])[:3] == [None, None, "hello "]


def test_the_earliest_of_several_stop_strings_cuts():
    assert push_all(Pieces(b"ab", b"cdef"), ("ef", "cd", "zz"), [1, 2]) == [None, "ab"]


def test_a_character_cut_in_two_is_waited_for():
    euro = "€".encode()
    assert push_all(Pieces(b"a", euro[:2], euro[2:]), ("€",), [1, 2, 3]) == [None, None, "a"]


def test_special_tokens_leave_no_text():
    assert push_all(Pieces(b"a", b"b"), ("ab",), [1, 0, 0, 2]) == [None, None, None, ""]


def test_a_string_that_was_passed_over_is_not_found_again():
    """The engine ignores what is found before min_new_tokens."""
    assert push_all(Pieces(b"stop", b" go ", b"stop"), ("stop",), [1, 2, 3]) == ["", None, "stop go "]


def test_decoding_stays_incremental():
    tokenizer = Pieces(b"x")
    push_all(tokenizer, ("y",), [1] * 200)
    assert tokenizer.decoded < 200 * 6


def test_a_string_found_too_early_is_not_found_again_beside_a_longer_one():
    assert push_all(Pieces(b"stop", b"x"), ("stop", "something longer"), [1, 2, 2, 2]) == ["", None, None, None]


def test_a_stop_string_is_found_though_its_token_ends_inside_a_character():
    euro = "€".encode()
    assert push_all(Pieces(b"a", b"stop" + euro[:1], euro[1:]), ("stop",), [1, 2, 3]) == [None, "a", None]


def test_random_byte_pieces_are_found_as_soon_as_the_whole_text_holds_them():
    rng = random.Random(0)
    text = "naïve 世界 👩‍👩‍👧 \u200bé, done\n"
    data = text.encode()
    for _ in range(200):
        cuts = sorted({0, len(data), *rng.sample(range(1, len(data)), 12)})
        tokenizer = Pieces(*(data[a:b] for a, b in itertools.pairwise(cuts)))
        ids = list(range(1, len(cuts)))
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randint(1, 4)]
        found = push_all(tokenizer, (stop,), ids)
        first = next(n for n in range(len(ids)) if stop in tokenizer.decode(ids[: n + 1]))
        assert found[:first] == [None] * first
        assert found[first] == text[: text.find(stop)]
