"""A Hub of one data set on this machine that answers what `datasets` asks."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" + "0" * 34

Answer = tuple[int, dict[str, str], bytes]


class Hub(ThreadingHTTPServer):
    """Serves the parquet files of a folder as the data set `hub_id`; 404 for all others."""

    def __init__(self, hub_id: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub_id = hub_id
        self.files = {path.name: path.read_bytes() for path in folder.glob("*.parquet")}
        self.requests: list[str] = []  # method and path of each so far
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def running(self) -> Iterator["Hub"]:
        """Answer within the `with`; after it the port is closed."""
        thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()

    def answer(self, path: str) -> Answer:
        """Return what the Hub says to a request for `path`, as huggingface_hub 2.4 reads it."""
        api, name = f"/api/datasets/{self.hub_id}", path.rpartition("/")[2]
        oids = {name: hashlib.sha1(content).hexdigest() for name, content in self.files.items()}
        if path == api or path.startswith(f"{api}/revision/"):
            return as_json({"id": self.hub_id, "sha": COMMIT})
        if path.startswith((f"{api}/tree/", f"{api}/paths-info/")):
            sizes = {name: len(content) for name, content in self.files.items()}
            files = [{"path": name, "size": sizes[name], "oid": oids[name]} for name in oids]
            return as_json([{"type": "file", **file} for file in files])
        headers = {"X-Repo-Commit": COMMIT}
        if not path.startswith(f"/datasets/{self.hub_id}/resolve/"):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if name not in self.files:
            return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
        return 200, headers | {"ETag": f'"{oids[name]}"'}, self.files[name]


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def respond(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {self.path}")
        status, headers, content = self.server.answer(self.path.partition("?")[0])
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = respond  # noqa: N815

    def log_message(self, *args: Any) -> None:
        """Keep the tests' console clean."""


def as_json(value: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
