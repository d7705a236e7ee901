"""A Hub of one data set on this machine that answers what `datasets` asks."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = tuple[int, dict[str, str], bytes]


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder as the data set `hub_id`; 404 for all others.

    Of `revisions` each is a folder of its own; other names of revisions are not there.
    """

    def __init__(self, hub_id: str, folder: Path, **revisions: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub_id = hub_id
        self.files: dict[str, dict[str, bytes]] = {}  # by revision, and by commit
        for name, place in {"main": folder, **revisions}.items():
            files = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
            self.files[name] = self.files[commit_of(name)] = files
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
        own = self.hub_id
        kinds = rf"(?:/api/datasets/{own}(?P<what>/[\w-]+)?|/datasets/{own}/resolve)"
        asked = re.fullmatch(rf"{kinds}(?:/(?P<revision>[^/]+)(?:/.*)?)?", path)
        if not asked:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        revision = asked["revision"] or "main"
        if revision not in self.files:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files, name = self.files[revision], path.rpartition("/")[2]
        oids = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
        if asked["what"] in ("/tree", "/paths-info"):
            sizes = {name: len(content) for name, content in files.items()}
            listed = [{"path": name, "size": sizes[name], "oid": oids[name]} for name in oids]
            return as_json([{"type": "file", **each} for each in listed])
        commit = revision if len(revision) == 40 else commit_of(revision)
        if path.startswith("/api"):
            return as_json({"id": self.hub_id, "sha": commit})
        headers = {"X-Repo-Commit": commit}
        if name not in files:
            return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
        return 200, headers | {"ETag": f'"{oids[name]}"'}, files[name]


def commit_of(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


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
