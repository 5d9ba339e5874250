"""An HTTP proxy in front of a real server that loses, holds, cuts or repeats what it is told."""

import http.client
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

UPDATES = ("/update_weights_from_tensor", "/update_weights_from_distributed")
LIMIT_S = 120
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close discards what is under way


@dataclass(frozen=True)
class Fault:
    """What happens to one update request.

    Attributes:
        kind: "lose": executed, then the connection is reset instead of a reply. "hold":
            executed, but the reply comes after `seconds`. "cut": both connections are closed
            after `seconds`, while the server executes. "twice": sent again after it was executed;
            the first reply goes back.
        nth: which update request after `plan`, from 1.
    """

    kind: Literal["lose", "hold", "cut", "twice"]
    nth: int
    seconds: float = 0.0


class FaultProxy(ThreadingHTTPServer):
    """A proxy to the server `target`, at `url`, until its `with` block ends.

    Args:
        target: URL of the server.
        rewrite: takes the path and the body of a request, returns the body that goes on.
    """

    daemon_threads = True

    def __init__(
        self, target: str, rewrite: Callable[[str, bytes], bytes] = lambda _, body: body
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.target, self.rewrite = urlsplit(target).netloc, rewrite
        self.plan(None)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def plan(self, fault: Fault | None) -> None:
        """Set the next fault and forget what was seen."""
        self.fault, self.num_updates = fault, 0
        self.seen: list[dict[str, Any]] = []
        """Update requests: which fault, and the reply (`status`, `text`) where somebody waited."""

    def __exit__(self, *error: Any) -> None:
        self.shutdown()
        super().__exit__(*error)


class _Handler(BaseHTTPRequestHandler):
    server: FaultProxy
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        proxy, self.close_connection = self.server, True
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = proxy.rewrite(self.path, body)
        is_update, fault = self.command == "POST" and self.path in UPDATES, None
        proxy.num_updates += is_update
        if is_update and proxy.fault is not None and proxy.fault.nth == proxy.num_updates:
            fault = proxy.fault
        kind = fault and fault.kind
        link = self._send(body)
        if fault is not None and kind == "cut":
            time.sleep(fault.seconds)
            assert not select.select([link.sock], [], [], 0)[0], "the server was faster"
            link.close()
            proxy.seen.append({"fault": kind})
            return self._reset()
        links = [link, self._send(body)] if kind == "twice" and self._has_replied(link) else [link]
        replies = [each.getresponse() for each in links]
        texts = [reply.read() for reply in replies]
        for reply, text in zip(replies, texts, strict=True) if is_update else ():
            proxy.seen.append({"fault": kind, "status": reply.status, "text": text.decode()})
        if kind == "lose":
            return self._reset()
        if fault is not None and kind == "hold":
            time.sleep(fault.seconds)
        with suppress(OSError):
            self.send_response(replies[0].status)
            self.send_header("Content-Type", replies[0].getheader("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(texts[0])))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(texts[0])
        return None

    do_GET = do_POST = _forward

    def _send(self, body: bytes) -> http.client.HTTPConnection:
        link = http.client.HTTPConnection(self.server.target, timeout=LIMIT_S)
        names = ("host", "content-length", "connection", "accept-encoding")
        headers = {name: v for name, v in self.headers.items() if name.lower() not in names}
        link.request(self.command, self.path, body, headers)
        return link

    @staticmethod
    def _has_replied(link: http.client.HTTPConnection) -> bool:
        return bool(select.select([link.sock], [], [], LIMIT_S)[0])

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.connection.close()

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""
