"""What tests of rewards share: rollouts made of a text, and a reward server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from trainers.types import Prompt, Rollout, Span


def rollout(text: str, answer: str | None = "42", *, tokens: int = 3, row: int = 0) -> Rollout:
    return Rollout(
        prompt=Prompt(index=row, ids=(1, 2), text=f"prompt {row}", answer=answer),
        sample_index=0,
        ids=(1, 2, *range(tokens)),
        spans=(Span(2, 2 + tokens, "policy"),),
        logprobs=(-1.0,) * tokens,
        logprobs_raw=(-1.0,) * tokens,
        finish_reason="stop",
        weight_version=0,
        text=text,
    )


class Server:
    """Answers the n-th request with the n-th of `replies`, the last for all further ones. A reply is a status and a body, or a
    function of the request that gives them; None: it waits until the test is over. Remembers requests in `seen`."""

    def __init__(self, replies: Sequence[Any]) -> None:
        self.seen: list[dict[str, Any]] = []
        self.over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = replies[min(len(server.seen), len(replies) - 1)]
                server.seen.append(request | {"path": self.path, "type": self.headers["Content-Type"]})
                if reply is None:
                    server.over.wait()
                    return
                status, body, *headers = reply(request) if callable(reply) else reply
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/score?k=1"

    def __enter__(self) -> Server:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


def rewards(*values: Any) -> tuple[int, bytes]:
    """A reply with these rewards."""
    return 200, json.dumps({"rewards": list(values)}).encode()


def lengths(request: dict[str, Any]) -> tuple[int, bytes]:
    """A reply with the number of characters of each completion."""
    return rewards(*map(len, request["completions"]))
