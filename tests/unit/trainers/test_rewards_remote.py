"""A reward server on loopback: real requests, and all the ways in which it may fail."""

from __future__ import annotations

import math
import re

import pytest
from reward_cases import Server, lengths, rewards, rollout

from trainers.deadline import MOST_STUCK
from trainers.rewards import RewardConfig, Rewards, remote

OK, DOWN = rewards(1.0), (500, b"out of memory")


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(remote, "BACKOFF_S", 0.01)


def score(server, texts=("a",), **options):
    return Rewards([RewardConfig(name=server.url, default=-1.0, **options)]).score(
        [rollout(t, row=i) for i, t in enumerate(texts)]
    )


def test_a_request_and_its_reply():
    with Server([lengths]) as server:
        found = Rewards([RewardConfig(name=server.url, weight=2.0)]).score([rollout("a", "4"), rollout("bcd\ud800", None, row=1)])
        assert Rewards([RewardConfig(name=server.url)]).score([]) == []
    assert [s.total for s in found] == [2.0, 8.0]
    label = server.url.removesuffix("?k=1")
    assert [s.parts for s in found] == [{label: 1.0}, {label: 4.0}]
    assert server.seen == [
        {
            "completions": ["a", "bcd\ud800"],
            "prompts": ["prompt 0", "prompt 1"],
            "answers": ["4", None],
            "path": "/score?k=1",
            "type": "application/json",
        }
    ]


@pytest.mark.parametrize(("batch_size", "sizes"), [(None, [64, 64, 22]), (100, [100, 50]), (150, [150]), (1000, [150])])
def test_large_batches_go_in_parts(batch_size, sizes):
    with Server([lengths]) as server:
        found = score(server, ["x" * i for i in range(150)], batch_size=batch_size)
    assert [s.total for s in found] == list(range(150))
    assert [len(request["completions"]) for request in server.seen] == sizes


@pytest.mark.parametrize(
    ("replies", "options", "total", "requests"),
    [
        ([DOWN, OK], {}, 1.0, 2),
        ([DOWN, (503, b""), OK], {}, 1.0, 3),
        ([DOWN], {}, -1.0, 3),
        ([DOWN], {"retries": 0}, -1.0, 1),
        ([DOWN, DOWN, DOWN, OK], {"retries": 3}, 1.0, 4),
        ([None, OK], {"timeout_s": 1.0}, 1.0, 2),
        ([None], {"timeout_s": 0.1, "retries": 1}, -1.0, 2),
        ([(400, b"bad field"), OK], {}, -1.0, 1),
        ([(404, b""), OK], {}, -1.0, 1),
        ([(429, b""), OK], {}, -1.0, 1),
        ([(200, b"<html>"), OK], {}, -1.0, 1),
        ([(200, b"\xff\xfe"), OK], {}, -1.0, 1),
        ([rewards(), OK], {}, -1.0, 1),
    ],
)
def test_what_is_tried_again(replies, options, total, requests):
    with Server(replies) as server:
        (found,) = score(server, **options)
    assert (found.total, bool(found.failed), len(server.seen)) == (total, total == -1.0, requests)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (DOWN, "it raised StatusError: HTTP 500 Internal Server Error: out of memory"),
        ((422, b"field 'completions'\nis unknown"), "HTTP 422 .*: field 'completions' is unknown"),
        ((200, b"<html>"), "the reply is not JSON"),
        ((200, b"[" * 100_000), "the reply is not JSON"),
        ((200, b"[1.0]"), 'the reply has no list "rewards"'),
        ((200, b'{"reward": [1.0]}'), 'the reply has no list "rewards"'),
        ((200, b'{"rewards": 1.0}'), 'the reply has no list "rewards"'),
        (rewards(1.0, 2.0), "the reply has 2 rewards for 1 completions"),
        (rewards(), "the reply has 0 rewards for 1 completions"),
        (rewards(math.nan), "it gave nan; allowed: a finite number"),
        (rewards(math.inf), "it gave inf"),
        (rewards("1.0"), "it gave '1.0'"),
        (rewards(None), "it gave None"),
        (rewards([1.0]), "it gave a list"),
    ],
)
def test_what_is_wrong_with_a_reply_is_said(caplog, reply, said):
    with Server([reply]) as server:
        (found,) = score(server, retries=0)
    assert found.total == -1.0
    assert re.search(f"row 0: .*{said}", caplog.text)


def test_a_number_that_is_not_finite_fails_alone():
    with Server([rewards(1.0, math.nan, True)]) as server:
        assert [s.total for s in score(server, "abc")] == [1.0, -1.0, 1.0]


def test_a_part_that_fails_leaves_the_others():
    with Server([rewards(1, 2), (400, b""), rewards(5, 6)]) as server:
        assert [s.total for s in score(server, "abcdef", batch_size=2)] == [1, 2, -1, -1, 5, 6]


def test_a_server_that_is_down_is_not_waited_for_at_each_request_of_a_step():
    with Server([DOWN]) as server:
        rewards = Rewards([RewardConfig(name=server.url, batch_size=1)])
        rewards.score([rollout("")] * 4)
        assert len(server.seen) == 3 + 1 + 1 + 1
        rewards.score([rollout("")] * 2)  # in the next step it is again
        assert len(server.seen) == 6 + 3 + 1
    with Server([(400, b""), DOWN, OK]) as server:
        assert [s.total for s in score(server, "ab", batch_size=1)] == [-1.0, 1.0], "one that refuses is not down"


def test_a_server_that_always_hangs_is_asked_a_few_times_only(monkeypatch):
    with Server([None]) as server:
        rewards = Rewards([RewardConfig(name=server.url, batch_size=1, timeout_s=0.1)])
        found = rewards.score([rollout("")] * (MOST_STUCK + 9))
        assert [bool(s.failed) for s in found] == [True] * (MOST_STUCK + 9)
        assert len(server.seen) <= MOST_STUCK
        waits = []
        monkeypatch.setattr(remote.time, "sleep", waits.append)
        rewards.score([rollout("")])  # those requests are not over yet
        assert waits == []


def test_nobody_listens(caplog):
    with Server([OK]) as server:
        pass
    (found,) = score(server)
    assert found.total == -1.0
    assert "Connection refused" in caplog.text


def test_a_reply_that_trickles_in_meets_the_deadline():
    """Each read of the socket is quick; all of them are not."""

    with Server([OK]) as server:
        handler = server._server.RequestHandlerClass

        def do_POST(self):
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            while not server.over.wait(0.05):
                self.wfile.write(b" ")
                self.wfile.flush()

        handler.do_POST = do_POST
        (found,) = score(server, timeout_s=0.5, retries=0)
        assert found.failed


def test_a_reply_without_end_is_refused(monkeypatch, caplog):
    monkeypatch.setattr(remote, "MOST_REPLY_BYTES", 100)
    with Server([(200, b'{"rewards": [1.0]}' + b" " * 100)]) as server:
        (found,) = score(server)
    assert found.total == -1.0
    assert "the reply is longer than 100 bytes" in caplog.text


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", ["/elsewhere", "file:///etc/passwd", "ftp://127.0.0.1/"])
def test_redirects_are_not_followed(caplog, code, target):
    with Server([(code, b"", ("Location", target)), OK]) as server:
        (found,) = score(server)
    assert (found.total, len(server.seen)) == (-1.0, 1)
    assert f"HTTP {code}" in caplog.text


def test_loopback_is_reached_without_the_environments_proxy(monkeypatch):
    with Server([rewards(7.0)]) as proxy, Server([rewards(1.0)]) as server:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert score(server)[0].total == 1.0
        (elsewhere,) = Rewards([RewardConfig(name="http://rewards.invalid/")]).score([rollout("")])
        assert elsewhere.total == 7.0, "other hosts are reached through it"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("a.localhost", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("localhost.org", False),
    ],
)
def test_loopback_hosts(host, expected):
    assert remote._is_loopback(host) is expected


def test_the_wait_doubles(monkeypatch):
    waits = []
    monkeypatch.setattr(remote, "BACKOFF_S", 0.5)
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    with Server([DOWN]) as server:
        score(server, retries=6)
    assert waits == [0.5, 1, 2, 4, 8, 8]
